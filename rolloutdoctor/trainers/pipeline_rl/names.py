"""What PipelineRL's trainer logs: `Completed steps 3: {...}` and W&B. Read: ServiceNow/PipelineRL 58d3934.

Values are means over the rows of all micro-batches and ranks, of the mean over a row's trained tokens.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "pipelinerl/finetune/rl/__init__.py, rl_step"
_LOOP = "pipelinerl/finetune_loop.py, rl_finetuning_worker"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("rl/reward", "reward", "mean over rows", _LOSS),
    MetricName("rl/min_reward", "reward_min", "the smallest reward", _LOSS),
    MetricName("rl/max_reward", "reward_max", "the largest reward", _LOSS),
    MetricName("rl/advantage", "advantage", "mean over rows", _LOSS),
    MetricName("rl/min_advantage", "advantage_min", "the smallest of the trained tokens", _LOSS),
    MetricName("rl/max_advantage", "advantage_max", "the largest of the trained tokens", _LOSS),
    MetricName("rl/entropy", "entropy", "mean over the tokens of a row, then over rows", _LOSS),
    MetricName("rl/kl", "kl", "k3 from the reference, mean over the tokens of a row, then over rows", _LOSS),
    MetricName("rl/loss", "loss", "with KL and entropy term", _LOSS),
    MetricName("rl/value_loss", "critic_loss", "the loss of the value function", _LOSS),
    MetricName("stats/grad_norm", "grad_norm", "before clipping", _LOOP),
    MetricName("rl/ratio_new_old", "ratio", "mean over the tokens of a row of new over old, then over rows", _LOSS),
    MetricName("stats/lr", "learning_rate", "of the first parameter group", _LOOP),
)
# fmt: on

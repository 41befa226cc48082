"""What ROLL's RLVR pipeline logs. Read: 0.1 to 0.3 and main of 2026-08; the agentic one has most of these names.

From 0.2 on the update sums over micro-batches and ranks, over the tokens or rows of the mini-batch, and averages over
mini-batches; before, plain means. Names may end in the reduction, as `@sum`. "Aggregated" is as `loss_agg_mode` says.
`token/total_response_length/clip` counts rows, and is left out. Metrics of one domain have its name before them.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "roll/pipeline/rlvr/actor_worker.py, loss_func"
_VALUES = "roll/utils/metrics/metrics_manager.py, add_values_metrics"
_TOKENS = "roll/utils/metrics/metrics_manager.py, add_token_metrics"
_STRATEGY = "roll/distributed/strategy"
_CORRECTION = "roll/utils/train_infer_corrections.py, compute_train_infer_correction"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("critic/score/mean", "reward", "mean over rows of the score", _VALUES),
    MetricName("critic/rewards/mean", "reward", "mean over rows of the sum of token rewards, normalised, less the KL",
        _VALUES),
    MetricName("critic/score/min", "reward_min", "the smallest score", _VALUES),
    MetricName("critic/score/max", "reward_max", "the largest score", _VALUES),
    MetricName("critic/rewards/min", "penalised_reward_min", "the smallest sum of token rewards", _VALUES),
    MetricName("critic/rewards/max", "penalised_reward_max", "the largest sum of token rewards", _VALUES),
    MetricName("critic/advantages/mean", "advantage", "mean over the response mask, whitened or scaled", _VALUES),
    MetricName("critic/advantages/min", "advantage_min", "the smallest over the response mask", _VALUES),
    MetricName("critic/advantages/max", "advantage_max", "the largest over the response mask", _VALUES),
    MetricName("critic/returns/mean", "return", "mean over the response mask", _VALUES),
    MetricName("group/mixed_groups_ratio", "zero_variance_share",
        "1 - the share of groups of only 0 or only 1; groups of any other equal score are not in it",
        "roll/utils/metrics/metrics_manager.py, add_group_metrics", factor=-1, offset=1, lower_bound=True),
    MetricName("critic/entropy/mean", "entropy",
        "aggregated over the batch, old policy; 0 unless old log-probs are recomputed", _VALUES, zero_when_off=True),
    MetricName("actor/kl_loss[@sum]", "kl", "k3, aggregated, without its coefficient", _LOSS),
    MetricName("critic/kl", "kl", "mean over rows of the token mean of the KL in the reward",
        "roll/utils/functionals.py, apply_kl_penalty"),
    MetricName("actor/total_loss[@sum]", "loss", "policy, KL and entropy term", _LOSS),
    MetricName("actor/pg_loss[@sum]", "policy_loss", "aggregated, without sample weights", _LOSS),
    MetricName("actor_train/grad_norm", "grad_norm", "before clipping, mean over mini-batches", _STRATEGY),
    MetricName("actor/ppo_ratio_clipfrac[@sum]", "clip_fraction",
        "share of tokens whose ratio is out of the range, whatever the advantage; before 0.2 of all cells", _LOSS),
    MetricName("actor/ppo_ratio_low_clipfrac[@sum]", "clip_fraction_low", "share of tokens below the range", _LOSS),
    MetricName("actor/ppo_ratio_high_clipfrac[@sum]", "clip_fraction_high", "share of tokens above the range", _LOSS),
    MetricName("actor/policykl[@sum]", "ppo_kl", "new minus old log-prob, aggregated", _LOSS, factor=-1),
    MetricName("actor/ratio_max[@max]", "ratio_max", "of all trained tokens", _LOSS),
    MetricName("actor/ratio_min[@min]", "ratio_min", "of all trained tokens", _LOSS),
    MetricName("token/response_length/mean", "response_length", "mean over rows of the response mask", _TOKENS),
    MetricName("tokens/response_length/mean", "response_length",
        "mean over rows of the response mask, agentic pipeline", "roll/pipeline/agentic/agentic_pipeline.py"),
    MetricName("token/response_length/min", "response_length_min", "the smallest of them", _TOKENS),
    MetricName("tokens/response_length/min", "response_length_min", "the smallest of them, agentic pipeline",
        "roll/pipeline/agentic/agentic_pipeline.py"),
    MetricName("token/response_length/max", "response_length_max", "the largest of them", _TOKENS),
    MetricName("tokens/response_length/max", "response_length_max", "the largest of them, agentic pipeline",
        "roll/pipeline/agentic/agentic_pipeline.py"),
    MetricName("actor/lr", "learning_rate", "of the first parameter group", "roll/pipeline/base_worker.py, train_step"),
    MetricName("actor/train_infer_ratio_token_mean[@sum]", "is_weight",
        "mean over rows of the token mean of old over sampler, not cut; before 0.3 with a filter on it only",
        _CORRECTION, "0.2"),
    MetricName("actor/is_weight_clipfrac[@sum]", "is_truncated_share", "share of tokens whose weight was cut",
        _CORRECTION, "0.2"),
    MetricName("time/step_total", "step_time", "seconds of the step before",
        "roll/pipeline/rlvr/rlvr_pipeline.py, run"),
)
# fmt: on

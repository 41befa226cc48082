"""What ms-swift's GRPO trainer logs: TRL's names, its own definitions. Read: 3.2 to 4.5 and main of 2026-08.

It has no `num_tokens`, no `completions/*_terminated_length`, and entropy only with `log_entropy`; the console and
`logging.jsonl` also have `train_speed(s/it)` (before 4 `(iter/s)`). Values are means over micro-batches since the last
line, clip ratios means of the ranks' means.
"""

from dataclasses import replace

from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.trainers.trl import names as trl

_GRPO = "swift/rlhf_trainers/grpo_trainer.py"
_LOSS = f"{_GRPO}, _compute_loss_and_metrics"
_LENGTHS = f"{_GRPO}, _prepare_batch_inputs"
_REWARDS = "swift/rl_core/advantage.py, compute_reward_metrics"
_OFF_POLICY = f"{_GRPO}, _compute_rollout_offpolicy_metrics"
_WEIGHTS = f"{_GRPO}, _compute_is_correction_metrics"
_LOG = "transformers/trainer.py, _maybe_log_save_evaluate"
_OLD = "swift/trainers/rlhf_trainer/grpo_trainer.py"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over rows of the weighted sum of rewards, less beta x KL with kl_in_reward",
        _REWARDS),
    MetricName("reward_std", "reward_std",
        "mean over groups of their std (n - 1); of the batch with scale_rewards=batch", _REWARDS),
    *(replace(metric, source=_REWARDS, since="", until=metric.until and "3.4") for metric in trl.FUNCTIONS),
    MetricName("frac_reward_zero_std", "zero_variance_share", "share of groups whose std is close to 0", _REWARDS,
        "3.7"),
    MetricName("entropy/mean", "entropy", "mean over rows of the mean over their tokens; with log_entropy", _LOSS,
        "3.7"),
    MetricName("kl", "kl",
        "k3: mean over the tokens of a rank, then over ranks; with kl_in_reward the sum over a row's tokens of old "
        "minus reference log-prob, mean over rows", _LOSS, "3.3", before_update=True),
    MetricName("kl", "kl", "k3: mean over the rows of a rank of the mean over their tokens, then over ranks", _OLD,
        until="3.3", before_update=True),
    MetricName("loss", "loss", "sum over micro-batches, mean over ranks and over the steps since the last line", _LOG),
    MetricName("grad_norm", "grad_norm", "L2 norm of all parameters before clipping, of the last step", _LOG),
    *(replace(metric, source=_LOSS, since="3.11" if "cispo" in metric.pattern else "3.4") for metric in trl.CLIPS),
    MetricName("clip_ratio", "clip_fraction",
        "share of tokens whose clipped term is the larger; from 3.5 on with Liger only",
        f"{_GRPO}, compute_liger_loss"),
    MetricName("completions/mean_length", "response_length", "mean over rows of the tokens of the completion mask",
        _LENGTHS, "3.3"),
    MetricName("completion_length", "response_length", "mean over rows of the tokens of the completion mask", _OLD,
        until="3.3"),
    MetricName("completions/min_length", "response_length_min", "the smallest of them", _LENGTHS, "3.3"),
    MetricName("completions/max_length", "response_length_max", "the largest of them", _LENGTHS, "3.3"),
    MetricName("completions/clipped_ratio", "truncated_share", "share of rows that the engine stopped at the limit",
        _LENGTHS, "3.3"),
    MetricName("learning_rate", "learning_rate", "of the first parameter group", _LOG),
    MetricName("rollout_correction/kl", "sampler_kl", "mean over the tokens of a rank of sampler minus old log-prob",
        _OFF_POLICY, "3.11"),
    MetricName("rollout_correction/k3_kl", "sampler_k3", "mean over the tokens of a rank of r - log r - 1, at most 10",
        _OFF_POLICY, "3.11"),
    MetricName("rollout_correction/rollout_ppl", "sampler_ppl",
        "mean over rows of exp of minus the row's mean log-prob", _OFF_POLICY, "3.11"),
    MetricName("rollout_correction/training_ppl", "trainer_ppl",
        "mean over rows of exp of minus the row's mean log-prob", _OFF_POLICY, "3.11"),
    MetricName("rollout_correction/ess", "sampler_ess",
        "1 over the token mean of the squared weights, kept within 1 / threshold and threshold, divided by their mean",
        _WEIGHTS, "3.11"),
    MetricName("rollout_correction/is_weight_mean", "is_weight", "token mean of the weight that is applied", _WEIGHTS,
        "3.11"),
    MetricName("rollout_correction/clipped_frac", "is_truncated_share",
        "share of tokens (of rows) whose weight was cut or dropped", _WEIGHTS, "3.11"),
)
# fmt: on

"""Metrics that TRL's GRPO and RLOO trainers log."""

from rolloutdoctor.metric_names.name import MetricName

_GRPO = "trl/trainer/grpo_trainer.py"
_LOG = "transformers/trainer.py, Trainer._maybe_log_save_evaluate"

NAMES: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over all gathered completions of the weighted sum of rewards", _GRPO),
    MetricName("reward_std", "reward_std", "mean over groups of the standard deviation (ddof 1) of the rewards", _GRPO),
    MetricName(
        "frac_reward_zero_std", "zero_variance_share", "share of completions whose group has a zero deviation", _GRPO
    ),
    MetricName("entropy", "entropy", "mean over the trained tokens of a micro-batch, then over micro-batches", _GRPO),
    MetricName("kl", "kl", "mean k3 over the trained tokens of a micro-batch, then over micro-batches", _GRPO),
    MetricName("loss", "loss", "mean over the steps since the last line", _LOG),
    MetricName("grad_norm", "grad_norm", "L2 norm over parameters before clipping", _LOG),
    MetricName("learning_rate", "learning_rate", "of the scheduler", _LOG),
    MetricName(
        "clip_ratio/region_mean", "clip_fraction", "share of trained tokens that are clipped, low or high", _GRPO
    ),
    MetricName("clip_ratio/low_mean", "clip_fraction_low", "share below 1 - epsilon with a negative advantage", _GRPO),
    MetricName(
        "clip_ratio/high_mean", "clip_fraction_high", "share above 1 + epsilon with a positive advantage", _GRPO
    ),
    MetricName("clip_ratio", "clip_fraction", "share of trained tokens that are clipped", _GRPO, until="0.18"),
    MetricName(
        "completions/mean_length", "response_length", "mean number of completion ids, or of the tool mask", _GRPO
    ),
    MetricName("completion_length", "response_length", "the same, under its first name", _GRPO, until="0.17"),
    MetricName("completions/max_length", "response_length_max", "largest number of completion ids", _GRPO),
    MetricName("completions/clipped_ratio", "truncated_share", "share of completions without an end token", _GRPO),
    MetricName(
        "sampling/sampling_logp_difference/mean",
        "sampler_logp_gap",
        "mean absolute difference of sampler and trainer log-probs over completion tokens",
        _GRPO,
    ),
    MetricName("sampling/sampling_logp_difference/max", "sampler_logp_gap_max", "its largest value", _GRPO),
    MetricName("sampling/importance_sampling_ratio/mean", "is_weight", "mean of the capped ratio", _GRPO),
    MetricName("num_tokens", "tokens", "tokens seen so far, prompts included", _GRPO),
    MetricName("step_time", "step_time", "seconds of the step", _GRPO),
)

"""What TRL's GRPO and RLOO trainers log. Read: 0.14 to 1.16; axolotl's GRPO is TRL's.

Values are means over the micro-batches (generation batches) since the last line, NaN left out from 1.0 on. "Tokens" are
those of the completion mask, from 0.26 on less those of tools.
"""

from rolloutdoctor.metric_names.name import MetricName

_OF_GENERATION = "trl/trainer/grpo_trainer.py, _generate_and_score_completions"
_GENERATE = "trl/trainer/grpo_trainer.py, _generate"
_LOSS = "trl/trainer/grpo_trainer.py, _compute_loss"
_FIRST = "trl/trainer/grpo_trainer.py, compute_loss"
_LIGER = "trl/trainer/grpo_trainer.py, compute_liger_loss"
_ASYNC = "trl/experimental/async_grpo/async_grpo_trainer.py"
_LOG = "transformers/trainer.py, _maybe_log_save_evaluate"

# fmt: off
GENERATION: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over the completions of all ranks of the weighted sum of rewards",
        _OF_GENERATION),
    MetricName("frac_reward_zero_std", "zero_variance_share",
        "share of completions whose group's std is close to 0; with scale_rewards=batch whether the batch's is: 0 or 1",
        _OF_GENERATION, "0.18"),
    MetricName("completions/mean_length", "response_length",
        "mean over all ranks of completion ids, or of the tool mask", _GENERATE, "0.17"),
    MetricName("completions/min_length", "response_length_min", "the smallest of them", _GENERATE, "0.17"),
    MetricName("completions/max_length", "response_length_max", "the largest of them", _GENERATE, "0.17"),
    MetricName("completions/clipped_ratio", "truncated_share",
        "share of all completions whose last id is neither EOS nor padding; before 0.24 without any EOS", _GENERATE,
        "0.17"),
    MetricName("tools/call_frequency", "tool_calls", "calls of all completions over their number", _GENERATE, "0.26"),
    MetricName("tools/failure_frequency", "tool_failures", "failed calls over calls; 0 without a call", _GENERATE,
        "0.26"),
    MetricName("num_tokens", "tokens_seen", "tokens of prompts and completions of all ranks so far", _GENERATE, "0.16"),
    MetricName("step_time", "step_time", "seconds in training_step of an optimizer step, generation included, rank 0",
        "trl/trainer/grpo_trainer.py, training_step", "0.26"),
    MetricName("loss", "loss", "sum over micro-batches, mean over ranks and over the steps since the last line", _LOG),
    MetricName("grad_norm", "grad_norm", "L2 norm of all parameters before clipping, of the last step", _LOG),
    MetricName("learning_rate", "learning_rate", "of the first parameter group", _LOG),
)
"""What a trainer derived from TRL's logs as TRL does."""

FUNCTIONS: tuple[MetricName, ...] = (
    MetricName("rewards/*/mean", "function_reward",
        "mean over the completions of all ranks that the function scored, without its weight", _OF_GENERATION, "0.17"),
    MetricName("rewards/*/std", "function_reward_std", "std (n - 1) over the same", _OF_GENERATION, "0.17"),
    MetricName("rewards/*", "function_reward", "mean over the completions of all ranks, without its weight",
        _OF_GENERATION, until="0.17"),
)
"""Of one reward function."""

CLIPS: tuple[MetricName, ...] = (
    MetricName("clip_ratio/region_mean", "clip_fraction",
        "share of tokens below 1 - epsilon with A < 0, or above 1 + epsilon_high with A > 0; of sequences where they "
        "have one ratio", _LOSS, "0.17", before_update=True),
    MetricName("cispo_clip_ratio", "is_truncated_share",
        "share of tokens whose ratio is above its cap epsilon_high, with A > 0", _LOSS, "0.26"),
    MetricName("clip_ratio/low_mean", "clip_fraction_low", "share of tokens below 1 - epsilon with A < 0", _LOSS,
        "0.17"),
    MetricName("clip_ratio/high_mean", "clip_fraction_high", "share of tokens above 1 + epsilon_high with A > 0", _LOSS,
        "0.17"),
    MetricName("clip_ratio/low_min", "clip_low_min", "the smallest share of a sequence", _LOSS, "0.17"),
    MetricName("clip_ratio/high_max", "clip_high_max", "the largest share of a sequence", _LOSS, "0.17"),
)
"""How much of an update was clipped; before 1.9 means of the ranks' means."""

NAMES: tuple[MetricName, ...] = (
    *GENERATION,
    *FUNCTIONS,
    MetricName("reward_std", "reward_std", "std (n - 1) over the completions of all ranks", _OF_GENERATION, "0.27"),
    MetricName("reward_std", "reward_std",
        "mean over groups of their std (n - 1); of the batch where that is the scale", _OF_GENERATION, until="0.27"),
    MetricName("completion_length", "response_length", "mean over all ranks of the tokens of a completion",
        _OF_GENERATION, until="0.17"),
    MetricName("entropy", "entropy", "mean over the tokens of all ranks", _LOSS, "1.9"),
    MetricName("entropy", "entropy", "mean over the tokens of a rank, then over ranks", _LOSS, "0.20", "1.9"),
    MetricName("kl", "kl",
        "mean k3 over the tokens of all ranks, absent with beta 0; RLOO: mean of old minus reference log-prob", _LOSS,
        "1.9", before_update=True),
    MetricName("kl", "kl", "the same over the tokens of a rank, then over ranks", _LOSS, "0.16", "1.9",
        before_update=True),
    MetricName("kl", "kl", "mean over completions of the mean k3 over their tokens", _FIRST, until="0.16",
        before_update=True),
    MetricName("policy_loss", "policy_loss", "mean over ranks of the micro-batch's loss before the entropy bonus",
        _LOSS, "1.8"),
    *CLIPS,
    MetricName("clip_ratio", "clip_fraction",
        "share of tokens whose clipped term is the larger; from 0.17 on with Liger only", _LIGER, "0.16", "1.14"),
    MetricName("sampling/sampling_logp_difference/mean", "sampler_logp_gap",
        "mean over the tokens of a rank of the absolute difference, then over ranks; 0 without a token", _OF_GENERATION,
        "0.23"),
    MetricName("sampling/sampling_logp_difference/max", "sampler_logp_gap_max", "the largest of all ranks",
        _OF_GENERATION, "0.23"),
    MetricName("sampling/importance_sampling_ratio/mean", "is_weight",
        "mean over the tokens (or sequences) of a rank of the truncated or masked ratio, then over ranks",
        _OF_GENERATION, "0.23"),
    MetricName("sample/staleness_mean", "version_lag", "mean over samples, asynchronous GRPO", _ASYNC, "1.11"),
)
# fmt: on

"""What NeMo-RL's GRPO logs. Read: 0.2.1 to 0.7 and main of 2026-08.

Metrics of the loss are means over the tokens (or rows) of a global batch of all ranks, then **summed** over the global
batches of a step: with k optimizer steps a step they are k times too large, the gradient norm too.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "nemo_rl/algorithms/loss/loss_functions.py, ClippedPGLossFn"
_GRPO = "nemo_rl/algorithms/grpo.py, grpo_train"
_ROLLOUT = "nemo_rl/experience/rollouts.py, run_multi_turn_rollout"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("[train/]reward", "reward", "mean over rows, shaped and scaled; with dynamic sampling before its filter",
        _GRPO),
    MetricName("[train/]advantages/mean", "advantage", "mean over the trained tokens", _GRPO, "0.4"),
    MetricName("[train/]advantages/min", "advantage_min", "the smallest of the trained tokens", _GRPO, "0.4"),
    MetricName("[train/]advantages/max", "advantage_max", "the largest of the trained tokens", _GRPO, "0.4"),
    MetricName("[train/]approx_entropy", "entropy",
        "minus the token mean of policy over sampler, times the log-prob: an estimate from the sampled tokens", _LOSS),
    MetricName("[train/]kl_penalty", "kl", "mean of the KL estimate as in the loss, without its coefficient", _LOSS),
    MetricName("[train/]loss", "loss", "policy and KL term", _GRPO),
    MetricName("[train/]grad_norm", "grad_norm", "norm before clipping, summed over the optimizer steps", _GRPO),
    MetricName("[train/]probs_ratio", "ratio", "token mean of new over old", _LOSS),
    MetricName("[train/]probs_ratio_max", "ratio_max", "of new over old, of all trained tokens; -1 without any", _LOSS,
        "0.5"),
    MetricName("[train/]probs_ratio_min", "ratio_min", "of new over old, of all trained tokens; -1 without any", _LOSS,
        "0.5"),
    MetricName("[train/]mean_gen_tokens_per_sample", "response_length",
        "mean over rows of what the model generated; before 0.3 with the environment's tokens", _ROLLOUT),
    MetricName("[train/]max_gen_tokens_per_sample", "response_length_max", "the largest of them", _ROLLOUT, "0.4"),
    MetricName("[train/]truncation_rate", "truncated_share", "share of rows that were cut off in any turn", _ROLLOUT),
    MetricName("[train/]avg_turns_per_sample", "turns", "mean over rows", _ROLLOUT),
    MetricName("[train/]max_turns_per_sample", "turns_max", "the largest of them", _ROLLOUT),
    MetricName("[train/]max_turns_reached_rate", "turn_cap_share",
        "share of rows that had not ended after max_rollout_turns turns; of the asynchronous engine, that took so many",
        _ROLLOUT),
    MetricName("[train/]lr", "learning_rate", "mean over micro-batches", _GRPO),
    MetricName("[train/]gen_kl_error", "sampler_k3",
        "token mean of r - log r - 1, r old over sampler; of the estimator that reference_policy_kl_type names", _LOSS,
        "0.4"),
    MetricName("[train/]sampling_importance_ratio", "is_weight",
        "token mean of old over sampler, cut where it is cut; also where it is not applied", _LOSS),
    MetricName("[train/]is_oob_ratio", "is_truncated_share", "share of tokens (of rows) whose weight is out of bounds",
        _LOSS, "0.6"),
    MetricName("[train/]avg_trajectory_age", "version_lag", "current less the mean version of the sampled groups",
        "nemo_rl/algorithms/async_utils/replay_buffer.py, sample", "0.4"),
    MetricName("[train/]total_num_tokens", "tokens", "prompt and response tokens of the rows of the step", _GRPO,
        "0.4"),
    MetricName("[train/]num_valid_samples", "samples", "rows with a sample mask of 1, of all global batches", _LOSS),
    MetricName("timing/train/total_step_time", "step_time", "seconds of the step", _GRPO),
)
# fmt: on

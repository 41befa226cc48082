"""What slime logs. Read: 0.1 to 0.3.1 and main of 2026-08.

`train/` is aggregated like the loss: mean over rollouts of the mean over their trained tokens (over tokens with
`calculate_per_token_loss`), over all ranks. `rollout/` is of all rows of the rollout. Files are those of 0.3.1.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "slime/backends/megatron_utils/loss.py, policy_loss_function"
_STEP = "slime/backends/megatron_utils/model.py, train"
_ROLLOUT = "slime/backends/megatron_utils/data.py, log_rollout_data"
_SAMPLES = "slime/ray/rollout.py, compute_metrics_from_samples"

# fmt: off
UPDATE: tuple[MetricName, ...] = (
    MetricName("train/kl_loss", "kl", "as the loss, of the KL estimate, without its coefficient", _LOSS),
    MetricName("train/loss", "loss", "with KL and entropy term", _LOSS),
    MetricName("train/pg_loss", "policy_loss", "the policy term", _LOSS),
    MetricName("train/grad_norm", "grad_norm", "Megatron's norm before clipping, of each optimizer step", _STEP),
    MetricName("train/pg_clipfrac", "clip_fraction", "as the loss, of whether the clipped term is the larger", _LOSS),
    MetricName("train/ppo_kl", "ppo_kl", "as the loss, of old minus new log-prob; gspo: of the row's mean", _LOSS),
    MetricName("train/lr-pg_*", "learning_rate", "of a parameter group, counted from 0", _STEP),
    MetricName("train/train_rollout_logprob_abs_diff", "sampler_logp_gap",
        "as the loss, of the absolute difference of trainer and sampler log-prob", _LOSS, "0.2"),
    MetricName("train/tis", "is_weight", "as the loss, of old over sampler, before it is truncated", _LOSS),
    MetricName("train/tis_clipfrac", "is_truncated_share", "as the loss, of whether the weight was cut or dropped",
        _LOSS),
)
SAMPLES: tuple[MetricName, ...] = (
    MetricName("rollout/raw_reward", "reward", "mean over rows of the reward before any normalisation", _ROLLOUT),
    MetricName("rollout/response_len/mean", "response_length", "mean over rows of the tokens of the loss mask",
        _SAMPLES, "0.2"),
    MetricName("rollout/response_lengths", "response_length", "mean over rows of all response tokens", _ROLLOUT),
    MetricName("rollout/advantages", "advantage", "mean over rows of the mean over their trained tokens", _ROLLOUT),
    MetricName("rollout/returns", "return", "mean over rows of the mean over their trained tokens", _ROLLOUT),
    MetricName("rollout/response_len/min", "response_length_min", "the smallest of the tokens of the loss mask",
        _SAMPLES, "0.2"),
    MetricName("rollout/response_len/max", "response_length_max", "the largest of the tokens of the loss mask",
        _SAMPLES, "0.2"),
    MetricName("rollout/truncated_ratio", "truncated_share", "share of samples of status truncated", _SAMPLES, "0.2"),
    MetricName("rollout/truncated", "truncated_share", "share of rows of status truncated", _ROLLOUT),
    MetricName("perf/step_time", "step_time", "seconds of training and of waiting for it, rank 0",
        "slime/utils/train_metric_utils.py, log_perf_data_raw", "0.2"),
)
NAMES: tuple[MetricName, ...] = (
    *UPDATE,
    *SAMPLES,
    MetricName("train/entropy_loss", "entropy", "as the loss, of the entropy; positive, the loss subtracts it", _LOSS),
    MetricName("rollout/kl", "kl", "mean over all response tokens of the KL in the reward; 0 with kl_coef 0", _ROLLOUT,
        zero_when_off=True),
)
# fmt: on

"""What open-instruct's GRPO logs. Read: 0.1 to 0.3 and main of 2026-08.

Metrics of the loss are means over packed sequences of their token means, weighted by tokens: token means of all ranks.
`debug/vllm_local_reverse_kl` weighs by the sampler's probability once more, and is left out.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "open_instruct/grpo_utils.py, populate_sample_loss_stats"
_STEP = "open_instruct/grpo_fast.py, step"
_LOOP = "open_instruct/grpo_fast.py, one_training_step"
_DATA = "open_instruct/data_loader.py, _data_preparation_loop"
_REWARD = "open_instruct/ground_truth_utils.py, RewardConfig.build"
_DEBUG = "open_instruct/grpo_utils.py, compute_vllm_local_debug_metrics"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("scores", "reward", "mean over the responses that are left after the filter of zero-variance groups",
        _DATA),
    MetricName("objective/*_reward", "function_reward",
        "mean over the responses of a verifier of its score, with its weight and factor", _REWARD),
    MetricName("batch/filtered_prompts_pct", "zero_variance_share",
        "share (not percent) of the groups seen that were dropped for equal scores; 0 without that filter", _DATA,
        "0.3", zero_when_off=True),
    MetricName("policy/entropy_avg", "entropy", "token mean; with record_entropy", _LOSS),
    MetricName("objective/kl2_avg", "kl", "token mean of k3, the third of four estimators; 0 without a reference",
        _LOSS, zero_when_off=True),
    MetricName("loss/kl_avg", "kl_term", "token mean of the KL term, with its coefficient", _LOSS),
    MetricName("loss/total_avg", "loss", "mean over packed sequences, by tokens, of parts whose sum is the loss",
        _LOSS),
    MetricName("loss/policy_avg", "policy_loss", "token mean of the policy term", _LOSS),
    MetricName("optim/grad_norm", "grad_norm", "mean over the optimizer steps, before clipping", _STEP, "0.3"),
    MetricName("policy/clipfrac_avg", "clip_fraction", "token mean of whether the clipped term is the larger", _LOSS),
    MetricName("val/sequence_lengths", "response_length", "mean over responses of all their tokens", _DATA),
    MetricName("val/advantages_mean", "advantage", "mean over responses", _DATA),
    MetricName("val/advantages_min", "advantage_min", "the smallest of them", _DATA),
    MetricName("val/advantages_max", "advantage_max", "the largest of them", _DATA),
    MetricName("val/ratio", "ratio", "token mean of new over old", _LOSS),
    MetricName("val/sequence_lengths_min", "response_length_min", "the smallest of them", _DATA),
    MetricName("val/sequence_lengths_max", "response_length_max", "the largest of them", _DATA),
    MetricName("val/stop_rate", "truncated_share", "1 - the share of responses that ended with a stop", _DATA,
        factor=-1, offset=1),
    MetricName("lr", "learning_rate", "of the first parameter group", _STEP),
    MetricName("debug/vllm_vs_local_logprob_diff_mean", "sampler_logp_gap",
        "mean over response tokens of the absolute difference, of the last pack of each rank", _DEBUG),
    MetricName("debug/vllm_vs_local_logprob_diff_max", "sampler_logp_gap_max", "the largest of them, mean over ranks",
        _DEBUG),
    MetricName("val/rho_weight", "is_weight", "token mean of the weight that is applied", _LOSS, "0.3"),
    MetricName("val/rho_clipfrac", "is_truncated_share", "token mean of whether the weight was cut", _LOSS, "0.3"),
    MetricName("num_steps_off_policy", "version_lag", "current step less the mean step of the sampling model", _DATA,
        "0.3"),
    MetricName("val/num_step_tokens", "tokens", "prompt and response tokens of the step", _LOOP),
    MetricName("val/num_total_tokens", "tokens_seen", "the same of the run so far", _LOOP),
    MetricName("time/total", "step_time", "seconds of the step", _LOOP),
)
# fmt: on

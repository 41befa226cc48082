"""What verl logs. Read: 0.2 to 0.9 and main of 2026-08; EasyR1 and rllm take most of its names.

Metrics of the update are averaged over mini-batches. "Aggregated" means: as `loss_agg_mode` says, so that with
seq-mean-token-sum a value grows with the length. Rewards are sums over the tokens of a row.
"""

from rolloutdoctor.metric_names.name import MetricName

_DATA = "verl/trainer/ppo/metric_utils.py, compute_data_metrics"
_LOSS = "verl/workers/utils/losses.py, ppo_loss"
_ACTOR = "verl/workers/actor/dp_actor.py, update_policy"
_POLICY = "verl/trainer/ppo/core_algos.py, compute_policy_loss_vanilla"
_FIT = "verl/trainer/ppo/ray_trainer.py, fit"
_WORKER = "verl/workers/engine_workers.py, _postprocess_output"
_DEBUG = "verl/utils/debug/metrics.py, calculate_debug_metrics"
_CORRECTION = "verl/trainer/ppo/rollout_corr_helper.py"
_MISMATCH = "verl/trainer/ppo/mismatch_helper.py"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("critic/score/mean", "reward", "mean over rows of the score, before any KL; from 0.6 without empty rows",
        _DATA),
    MetricName("critic/rewards/mean", "reward", "the same less the KL penalty of use_kl_in_reward", _DATA),
    MetricName("actor/entropy", "entropy",
        "aggregated over the batch under the old policy; in 0.7 with an entropy bonus mean over micro-batches of the "
        "update", _FIT, "0.4.1"),
    MetricName("actor/entropy_loss", "entropy",
        "aggregated over a micro-batch, then summed; positive, the loss subtracts it", _LOSS, "0.7.1"),
    MetricName("actor/entropy_loss", "entropy", "aggregated over the batch under the old policy; positive", _FIT, "0.4",
        "0.4.1"),
    MetricName("actor/entropy_loss", "entropy", "token mean of a micro-batch, then over micro-batches; positive",
        _ACTOR, until="0.4"),
    MetricName("actor/kl_loss", "kl", "aggregated over the mini-batch, without its coefficient", _LOSS, "0.8"),
    MetricName("actor/kl_loss", "kl",
        "aggregated, without its coefficient, and summed over all mini-batches and epochs", _ACTOR, "0.7", "0.8"),
    MetricName("actor/kl_loss", "kl", "aggregated, without its coefficient, over the number of micro-batches of a rank",
        _ACTOR, "0.6", "0.7"),
    MetricName("actor/kl_loss", "kl", "aggregated, without its coefficient, mean over micro-batches", _ACTOR, "0.5",
        "0.6"),
    MetricName("actor/kl_loss", "kl", "aggregated, without its coefficient, of the last micro-batch of each rank",
        _ACTOR, until="0.5"),
    MetricName("actor/reward_kl_penalty", "kl", "mean over rows of the token mean of the KL in the reward, old policy",
        "verl/trainer/ppo/ray_trainer.py, apply_kl_penalty", "0.4"),
    MetricName("critic/kl", "kl", "mean over rows of the token mean of the KL in the reward, old policy",
        "verl/trainer/ppo/ray_trainer.py, apply_kl_penalty", until="0.4"),
    MetricName("actor/loss", "loss", "sum over micro-batches, mean over ranks", _WORKER, "0.7"),
    MetricName("actor/pg_loss", "policy_loss", "aggregated over the mini-batch", _LOSS, "0.8"),
    MetricName("actor/pg_loss", "policy_loss", "aggregated and summed over all mini-batches and epochs", _ACTOR, "0.7",
        "0.8"),
    MetricName("actor/pg_loss", "policy_loss", "aggregated, over the number of micro-batches of a rank", _ACTOR, "0.6",
        "0.7"),
    MetricName("actor/pg_loss", "policy_loss", "aggregated, mean over micro-batches", _ACTOR, until="0.6"),
    MetricName("actor/grad_norm", "grad_norm", "L2 norm before clipping", _WORKER),
    MetricName("actor/pg_clipfrac", "clip_fraction",
        "share of tokens whose clipped term is the larger: mean over micro-batches and ranks", _POLICY),
    MetricName("actor/ppo_kl", "ppo_kl", "token mean of old minus new log-prob: mean over micro-batches and ranks",
        _POLICY),
    MetricName("response_length/mean", "response_length", "mean over rows of the attention mask of the response",
        _DATA),
    MetricName("response_length/max", "response_length_max", "the largest of them", _DATA),
    MetricName("response_length/clip_ratio", "truncated_share",
        "share of rows as long as the padded responses are wide, mostly max_response_length, whether they ended or not",
        _DATA),
    MetricName("actor/lr", "learning_rate", "of the first parameter group", _WORKER),
    MetricName("training/rollout_probs_diff_mean", "sampler_gap",
        "mean over response tokens of the absolute difference of probabilities", _DEBUG, "0.6"),
    MetricName("training/rollout_probs_diff_mean", "sampler_gap", "the same over the attention mask", _FIT, "0.4",
        "0.6"),
    MetricName("training/rollout_probs_diff_max", "sampler_gap_max", "the largest of them", _DEBUG, "0.4"),
    MetricName("training/rollout_actor_probs_pearson_corr", "sampler_pearson",
        "of the probabilities of all response tokens", _DEBUG, "0.6"),
    MetricName("rollout_corr/kl", "sampler_kl", "token mean of sampler minus old log-prob",
        f"{_CORRECTION}, compute_offpolicy_metrics", "0.8"),
    MetricName("rollout_corr/kl", "sampler_kl", "the same against the policy under update, mean over micro-batches",
        f"{_CORRECTION}, compute_rollout_corr_metrics_from_logprobs", "0.6.1", "0.8"),
    MetricName("mismatch/mismatch_kl", "sampler_kl", "token mean of sampler minus old log-prob", _MISMATCH, "0.6",
        "0.6.1"),
    MetricName("rollout_corr/k3_kl", "sampler_k3",
        "token mean of r - log r - 1, r trainer over sampler; up to 0.7 of the policy under update",
        f"{_CORRECTION}, compute_offpolicy_metrics", "0.6.1"),
    MetricName("mismatch/mismatch_k3_kl", "sampler_k3", "token mean of r - log r - 1, r old over sampler", _MISMATCH,
        "0.6", "0.6.1"),
    MetricName("rollout_corr/rollout_ppl", "sampler_ppl", "mean over rows of exp of minus the row's mean log-prob",
        f"{_CORRECTION}, compute_offpolicy_metrics", "0.6.1"),
    MetricName("mismatch/mismatch_rollout_ppl", "sampler_ppl", "mean over rows of exp of minus the row's mean log-prob",
        _MISMATCH, "0.6", "0.6.1"),
    MetricName("rollout_corr/training_ppl", "trainer_ppl", "mean over rows of exp of minus the row's mean log-prob",
        f"{_CORRECTION}, compute_offpolicy_metrics", "0.6.1"),
    MetricName("mismatch/mismatch_training_ppl", "trainer_ppl",
        "mean over rows of exp of minus the row's mean log-prob", _MISMATCH, "0.6", "0.6.1"),
    MetricName("rollout_corr/rollout_is_eff_sample_size", "sampler_ess",
        "1 over the token mean of the squared weights, cut at the threshold and divided by their mean",
        f"{_CORRECTION}, compute_is_metrics", "0.6.1"),
    MetricName("rollout_corr/rollout_is_mean", "is_weight", "token mean of the weight that is applied",
        f"{_CORRECTION}, compute_is_metrics", "0.6.1"),
    MetricName("mismatch/rollout_is_mean", "is_weight", "token mean of the weight", _MISMATCH, "0.6", "0.6.1"),
    MetricName("rollout_corr/rollout_is_ratio_fraction_high", "is_truncated_share",
        "share of tokens (of sequences) whose raw weight is above the threshold", f"{_CORRECTION}, compute_is_metrics",
        "0.6.1"),
    MetricName("training/off_policy/trajectory_staleness/mean", "version_lag",
        "mean over rows of the current less the newest version that sampled the row",
        "verl/trainer/ppo/v1/trainer_base.py", "0.9"),
    MetricName("perf/total_num_tokens", "tokens", "prompt and response tokens of the step, of all ranks",
        "verl/trainer/ppo/metric_utils.py, compute_throughout_metrics", "0.3"),
    MetricName("perf/time_per_step", "step_time", "seconds of the step, generation included",
        "verl/trainer/ppo/metric_utils.py, compute_throughout_metrics", "0.3"),
    MetricName("timing_s/step", "step_time", "the same", "verl/trainer/ppo/metric_utils.py, compute_timing_metrics"),
)
# fmt: on

"""What SkyRL logs. Read: skyrl-train 0.1 to 0.4, which became skyrl 0.1, to skyrl 0.3 and main of 2026-08.

Releases are skyrl's; "before 0.1" is skyrl-train up to 0.3. Losses of the update are sums over micro-batches and ranks,
other metrics plain means over micro-batches and ranks; then both are means over mini-batches.
`policy/rollout_train_prob_diff_mean` of skyrl-train is no difference but the mean ratio, and is left out. The console
of a run with another tracker has the names of the update without `policy/`.
"""

from rolloutdoctor.metric_names.name import MetricName

_WORKER = "skyrl/backends/skyrl_train/workers/worker.py, _forward_backward_micro"
_OLD_WORKER = "skyrl-train/skyrl_train/workers/worker.py"
_TRAINER = "skyrl/train/trainer.py"
_OFF_POLICY = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
_GENERATE = "skyrl/train/generators/utils.py, get_rollout_metrics"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("reward/avg_raw_reward", "reward", "mean over trajectories of the environment's reward",
        f"{_TRAINER}, postprocess_generator_output"),
    MetricName("loss/avg_final_rewards", "reward", "mean over rows of the token rewards, less the KL penalty",
        f"{_TRAINER}, compute_advantages_and_returns"),
    MetricName("loss/avg_raw_advantages", "advantage", "mean over the trained tokens",
        f"{_TRAINER}, compute_advantages_and_returns"),
    MetricName("policy/policy_entropy", "entropy", "mean over the trained tokens of a micro-batch", _WORKER),
    MetricName("[policy/]policy_kl", "kl",
        "mean over the rows of a micro-batch of their token means, without its coefficient", _WORKER),
    MetricName("loss/avg_kl", "kl", "mean over rows of their token means, of the KL in the reward",
        f"{_TRAINER}, apply_reward_kl_penalty"),
    MetricName("[policy/]final_loss", "loss", "policy, KL and entropy term", _WORKER),
    MetricName("policy/policy_loss", "policy_loss", "the policy term", _WORKER),
    MetricName("policy/grad_norm", "grad_norm", "before clipping, of each optimizer step",
        f"{_TRAINER}, _execute_training_step", "0.1"),
    MetricName("[policy/]raw_grad_norm", "grad_norm", "before clipping, of each optimizer step", _OLD_WORKER,
        until="0.1"),
    MetricName("policy/loss_metrics/clip_ratio", "clip_fraction",
        "share of tokens whose clipped term is the larger; 0 in losses that do not clip",
        "skyrl/backends/skyrl_train/utils/ppo_utils.py", "0.1"),
    MetricName("policy/ppo_clip_ratio", "clip_fraction", "share of tokens whose clipped term is the larger",
        _OLD_WORKER, until="0.1"),
    MetricName("generate/avg_num_tokens", "response_length", "mean over trajectories of all tokens after the prompt",
        _GENERATE),
    MetricName("generate/min_num_tokens", "response_length_min", "the smallest of them", _GENERATE),
    MetricName("generate/max_num_tokens", "response_length_max", "the largest of them", _GENERATE),
    MetricName("[policy/]policy_lr", "learning_rate", "of the first parameter group", _WORKER),
    MetricName("policy/rollout_train_logprobs_abs_diff_mean", "sampler_logp_gap",
        "mean over trained tokens of the absolute difference", f"{_TRAINER}, fwd_logprobs_values_reward", "0.1"),
    MetricName("policy/rollout_train_logprobs_abs_diff_max", "sampler_logp_gap_max", "the largest of them",
        f"{_TRAINER}, fwd_logprobs_values_reward", "0.3"),
    MetricName("policy/loss_metrics/is_ratio_mean", "is_weight",
        "mean over the trained tokens of a micro-batch of old over sampler, not cut", _OFF_POLICY, "0.1"),
    MetricName("policy/loss_metrics/tis_token_clip_high_ratio", "is_truncated_share",
        "share of tokens whose weight was cut", _OFF_POLICY, "0.1"),
    MetricName("policy/loss_metrics/tis_seq_clip_high_ratio", "is_truncated_share",
        "share of rows whose weight was cut", _OFF_POLICY, "0.1"),
    MetricName("async/staleness_mean", "version_lag", "mean over the groups of a step",
        "skyrl/train/fully_async_trainer.py"),
    MetricName("timing/step", "step_time", "seconds of the step", _TRAINER),
)
# fmt: on

"""What torchforge's GRPO app logs: a block of lines for each step, the same names in W&B. Read: 6e77f0b, 2025-11."""

from rolloutdoctor.metric_names.name import MetricName

_APP = "apps/grpo/main.py"
_REWARD = f"{_APP}, evaluate_response"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("reward/evaluate_response/avg_total_reward", "reward",
        "mean over responses and reward functions of what a function gave", _REWARD),
    MetricName("reward/evaluate_response/avg_*Reward_reward", "function_reward", "mean over responses", _REWARD),
    MetricName("reward/evaluate_response/std_*Reward_reward", "function_reward_std", "over responses", _REWARD),
    MetricName("grpo_loss/kl_divergence_mean", "kl", "k3, mean over the trained tokens of a rank", _APP),
    MetricName("grpo_loss/total_loss", "loss", "policy and KL term", _APP),
    MetricName("rl_trainer/avg_grpo_loss", "loss", "mean over ranks", "src/forge/actors/trainer.py, train_step"),
    MetricName("rl_trainer/avg_loss", "loss", "mean over ranks", "src/forge/actors/trainer/titan.py, train_step"),
    MetricName("grpo_loss/policy_gradient_loss", "policy_loss", "the policy term", _APP),
    MetricName("grpo_loss/advantage_mean", "advantage", "mean over the trained tokens", _APP),
    MetricName("episode/avg_response_tokens", "response_length", "mean over episodes", _APP),
    MetricName("episode/min_response_tokens", "response_length_min", "of an episode", _APP),
    MetricName("episode/max_response_tokens", "response_length_max", "of an episode", _APP),
    MetricName("rl_trainer/learning_rate", "learning_rate", "the smallest of the ranks",
        "src/forge/actors/trainer/titan.py, train_step"),
    MetricName("buffer/sample/avg_sampled_policy_age", "version_lag",
        "mean over the sampled episodes of the current less the sampling version",
        "src/forge/actors/replay_buffer.py, sample"),
)
# fmt: on

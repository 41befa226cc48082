"""What OpenRLHF logs. Read: 0.5 to 0.11.

W&B and TensorBoard have `train/` before every name (also `train/rollout/reward_mean`), the console has not. What the
update logs is a mean over micro-batches weighted by tokens or rows, over ranks and epochs.
"""

from rolloutdoctor.metric_names.name import MetricName

_ACTOR = "openrlhf/trainer/ray/ppo_actor.py, ppo_train"
_LOSS = "openrlhf/models/loss.py, PolicyLoss"
_ROLLOUT = "openrlhf/trainer/ppo_trainer.py, _compute_rollout_stats"
_MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("[train/]rollout/reward_mean", "reward", "mean over the rows of the rollout, length penalties included",
        _ROLLOUT, "0.10"),
    MetricName("[train/]reward", "reward", "mean over rows as they are trained, length penalties included", _ACTOR),
    MetricName("[train/]group_reward_std", "reward_std", "mean over rows of their group's std (n - 1)", _MAKER, "0.9"),
    MetricName("[train/]rollout/reward_std", "reward_std", "std (n - 1) over the rows of the rollout", _ROLLOUT,
        "0.10"),
    MetricName("[train/]entropy_loss", "entropy", "token mean; from 0.10.4 on weighted twice by tokens; positive",
        _ACTOR, "0.8"),
    MetricName("[train/]kl", "kl",
        "mean over rows of their token means of the KL in the reward, without its coefficient; with use_loss the token "
        "mean in the loss, weighted twice by tokens", _ACTOR),
    MetricName("[train/]policy_loss", "policy_loss",
        "token mean; from 0.10.4 on weighted twice by tokens: too large where micro-batches differ in size", _ACTOR),
    MetricName("[train/]actor_grad_norm", "grad_norm", "of the last optimizer step of the iteration", _ACTOR, "0.10"),
    MetricName("[train/]critic_loss", "critic_loss", "mean over micro-batches", "openrlhf/trainer/ray/ppo_critic.py"),
    MetricName("[train/]critic_grad_norm", "critic_grad_norm", "of the last optimizer step of the iteration",
        "openrlhf/trainer/ray/ppo_critic.py", "0.10"),
    MetricName("[train/]ppo_clip_ratio", "clip_fraction", "token mean of whether the clipped term is the larger", _LOSS,
        "0.9"),
    MetricName("[train/]ppo_kl", "ppo_kl", "token mean of old minus new log-prob", _LOSS, "0.9"),
    MetricName("[train/]rollout/response_length_mean", "response_length", "mean over the rows of the rollout", _ROLLOUT,
        "0.10"),
    MetricName("[train/]response_length", "response_length", "mean over rows as they are trained", _ACTOR),
    MetricName("[train/]rollout/truncated_rate", "truncated_share", "share of the rows of the rollout", _ROLLOUT,
        "0.10"),
    MetricName("[train/]truncated", "truncated_share", "share of rows as they are trained", _ACTOR, "0.10"),
    MetricName("[train/]actor_lr", "learning_rate", "of the first parameter group, at the end of the iteration",
        _ACTOR),
    MetricName("[train/]vllm_kl", "sampler_kl", "token mean of sampler minus old log-prob", _LOSS, "0.9"),
    MetricName("[train/]rollout/num_samples", "samples", "rows of the rollout", _ROLLOUT, "0.10"),
    MetricName("[train/]timing/step_total", "step_time", "seconds of the step", "openrlhf/trainer/ppo_trainer.py, fit",
        "0.10"),
)
# fmt: on

"""What TRL's PPO trainers log, and programs that run them. Read: 0.19.1, and 0.11 of the one before.

Sums over a response are over its padded width; `policy/entropy_avg` and what the update logs count padding, too. The
trainer before 0.12 masks it.
"""

from rolloutdoctor.metric_names.name import MetricName

_TRAIN = "trl/trainer/ppo_trainer.py, train"
_STEP = "trl/trainer/ppo_trainer.py, record_step_stats"
_UPDATE = "trl/trainer/ppo_trainer.py, loss"
_LOGGED = "trl/trainer/ppo_trainer.py, log_stats"
_BEFORE = "0.12"
"""Release whose trainer is another one."""

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("objective/scores", "reward", "mean over responses of the reward model's score", _TRAIN),
    MetricName("objective/rlhf_reward", "penalised_reward",
        "mean over responses of the score plus the sum of the KL penalty over the response", _TRAIN),
    MetricName("policy/entropy_avg", "entropy", "mean over tokens, micro-batches and passes of the update", _TRAIN),
    MetricName("objective/kl", "response_kl",
        "sum over a response of old minus reference log-prob, mean over responses", _TRAIN, before_update=True),
    MetricName("objective/entropy", "response_entropy",
        "sum over a response of minus the old log-prob, mean over responses; padding may count as -1", _TRAIN),
    MetricName("loss/policy_avg", "policy_loss", "mean over the micro-batches of all passes", _TRAIN),
    MetricName("policy/clipfrac_avg", "clip_fraction", "mean over the micro-batches of all passes", _TRAIN),
    MetricName("policy/approxkl_avg", "ppo_kl", "half the mean squared difference of new and old log-prob", _TRAIN),
    MetricName("loss/value_avg", "critic_loss", "mean over the micro-batches of all passes", _TRAIN),
    MetricName("val/ratio", "ratio", "mean over the micro-batches of all passes", _TRAIN),
    MetricName("val/num_eos_tokens", "eos_tokens", "count over the uncut responses of the main process", _TRAIN),
    MetricName("lr", "learning_rate", "of the first parameter group", _TRAIN),
    MetricName("ppo/mean_scores", "reward", "mean over responses of the score", _STEP, until=_BEFORE),
    MetricName("env/reward_mean", "reward", "mean of the rewards that were given to the step", _LOGGED, until=_BEFORE),
    MetricName("ppo/std_scores", "reward_std", "standard deviation of the scores of the batch", _STEP, until=_BEFORE),
    MetricName("env/reward_std", "reward_std", "of the rewards that were given to the step", _LOGGED, until=_BEFORE),
    MetricName("objective/kl_coef", "kl_coefficient", "of the KL in the reward", _STEP, until=_BEFORE),
    MetricName("tokens/responses_len_mean", "response_length", "mean tokens of a response", _STEP, until=_BEFORE),
    MetricName("ppo/returns/mean", "return", "mean over tokens, mean over mini-batches", _UPDATE, until=_BEFORE),
    MetricName("ppo/policy/advantages_mean", "advantage",
        "mean over tokens of the whitened advantages, mean over mini-batches", _UPDATE, until=_BEFORE),
    MetricName("ppo/policy/entropy", "entropy", "mean over tokens, mean over mini-batches", _UPDATE, until=_BEFORE),
    MetricName("ppo/policy/approxkl", "ppo_kl", "half the mean squared difference of new and old log-prob", _UPDATE,
        until=_BEFORE),
    MetricName("ppo/policy/clipfrac", "clip_fraction", "mean over tokens and mini-batches", _UPDATE, until=_BEFORE),
    MetricName("ppo/loss/policy", "policy_loss", "mean over mini-batches", _UPDATE, until=_BEFORE),
    MetricName("ppo/loss/value", "critic_loss", "mean over mini-batches, without its coefficient", _UPDATE,
        until=_BEFORE),
    MetricName("ppo/loss/total", "loss", "policy loss plus vf_coef times the value loss", _UPDATE, until=_BEFORE),
    MetricName("ppo/learning_rate", "learning_rate", "of the first parameter group", _STEP, until=_BEFORE),
)
# fmt: on

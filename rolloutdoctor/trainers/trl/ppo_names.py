"""What TRL's PPO trainer logs, and programs that run it. Read: 0.19.1.

Sums over a response are over its padded width; `policy/entropy_avg` and what the update logs count padding, too.
"""

from rolloutdoctor.metric_names.name import MetricName

_TRAIN = "trl/trainer/ppo_trainer.py, train"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("objective/scores", "reward", "mean over responses of the reward model's score", _TRAIN),
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
    MetricName("lr", "learning_rate", "of the first parameter group", _TRAIN),
)
# fmt: on

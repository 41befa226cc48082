"""What Oat's online learners log: `pprint`ed dicts on the console, the same names in W&B. Read: sail-sg/oat c1a074c.

What the update logs is of its last mini-batch, mean over ranks, but for what is said to be of all.
"""

from rolloutdoctor.metric_names.name import MetricName

_PPO = "oat/algorithms/ppo.py, learning_step"
_ACTOR = "oat/algorithms/ppo.py, step"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("actor/rewards", "reward", "mean over the responses of a rank's actor, then over ranks", _ACTOR),
    MetricName("train/adv_mean", "advantage", "mean over the responses of a rank", _PPO),
    MetricName("train/adv_min", "advantage_min", "the smallest of a rank, mean over ranks", _PPO),
    MetricName("train/adv_max", "advantage_max", "the largest of a rank, mean over ranks", _PPO),
    MetricName("train/entropy", "entropy", "mean over the response mask", _PPO),
    MetricName("train/kl3", "response_kl", "sum over a response of k3, mean over responses; with beta above 0", _PPO),
    MetricName("train/pg_loss", "policy_loss", "as the loss, without the KL term", _PPO),
    MetricName("train/reg_loss", "kl_term", "the KL term, with beta", _PPO),
    MetricName("train/critic_loss", "critic_loss", "the loss of the value function; with critic_type ppo", _PPO),
    MetricName("train/policy_grad_norm", "grad_norm", "the largest of the optimizer steps, before clipping", _PPO),
    MetricName("train/pg_clipfrac", "clip_fraction",
        "mean over rows of their token means of whether the clipped term is the larger, of all mini-batches", _PPO),
    MetricName("train/kl_sample_train_v1", "sampler_kl", "mean over tokens of sampler minus new log-prob", _PPO),
    MetricName("actor/response_tok_len", "response_length", "mean over the responses of a rank's actor", _ACTOR),
    MetricName("misc/lr", "learning_rate", "of the first parameter group", "oat/learners/base.py, eval_and_log"),
)
# fmt: on

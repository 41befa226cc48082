"""What LLaMA-Factory's PPO trainer logs: three names of its own, none of TRL's. Read: hiyouga/LLaMA-Factory 0005269."""

from rolloutdoctor.metric_names.name import MetricName

_PPO = "src/llamafactory/train/ppo/trainer.py, ppo_train"

NAMES: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over the rows of rank 0 since the last line", _PPO),
    MetricName("loss", "loss", "policy and value term of rank 0, mean over the rows since the last line", _PPO),
    MetricName("learning_rate", "learning_rate", "of the last step", _PPO),
    MetricName("lr", "learning_rate", "of the last step, in trainer_log.jsonl", "src/llamafactory/train/callbacks.py"),
)

"""What the RL trainer of verifiers logs, on top of the transformers Trainer. Read: 0.1.5 to 0.1.9.

Values are means over the batch, of rank 0.
"""

from rolloutdoctor.metric_names.name import MetricName

_TRAINER = "verifiers/rl/trainer/trainer.py, training_step"
_BATCH = "verifiers/rl/trainer/orchestrator.py, generate_batch"
_LOG = "transformers/trainer.py, _maybe_log_save_evaluate"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("reward", "reward", "mean over rollouts", _BATCH),
    MetricName("reward/std", "reward_std", "over the rollouts of the batch", _BATCH),
    MetricName("entropy", "entropy", "mean over the tokens of the mask", _TRAINER),
    MetricName("loss", "loss", "mean over micro-batches and ranks", _LOG),
    MetricName("grad_norm", "grad_norm", "L2 norm of all parameters before clipping, of the last step", _LOG),
    MetricName("tokens/completion", "response_length", "mean over steps of trajectories", _BATCH),
    MetricName("importance_ratio", "is_weight", "mean over tokens of trainer over sampler", _TRAINER),
    MetricName("learning_rate", "learning_rate", "of the first parameter group", _LOG),
)
# fmt: on

"""What miles logs: slime's names, and its own. Read: 0.1.0 and main of 2026-08."""

from dataclasses import replace

from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.trainers.slime import names as slime

_LOSS = "miles/backends/training_utils/loss_hub/losses.py, policy_loss_function"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    *(replace(name, source="miles/backends/training_utils", since="") for name in slime.UPDATE),
    *(replace(name, source="miles/backends/training_utils and miles/ray/rollout", since="") for name in slime.SAMPLES),
    MetricName("train/entropy_loss", "entropy",
        "as the loss, of the entropy, positive; 0 unless entropy_coef or observe_training_entropy is set", _LOSS,
        zero_when_off=True),
    MetricName("train/train_rollout_kl", "sampler_k3", "as the loss, of k3 from sampler to trainer, at most 10", _LOSS),
    MetricName("rollout/fully_async/avg_staleness", "version_lag",
        "mean over groups that were trained of the current less the oldest version that sampled the group",
        "miles/rollout/fully_async_data_buffer.py, get_metrics"),
)
# fmt: on

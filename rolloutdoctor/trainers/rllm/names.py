"""What rLLM's own trainer logs, with tinker or Fireworks: a table for each step. Read: rllm-org/rllm 9beb6e0.

With verl's workers its names are verl's.
"""

from rolloutdoctor.metric_names.name import MetricName

_ADVANTAGES = "rllm/trainer/algorithms/advantage.py, collect_reward_and_advantage_from_trajectory_groups"
_TINKER = "rllm/trainer/tinker/tinker_metrics_utils.py"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("reward/*/mean", "reward", "mean over the trajectories of a role", _ADVANTAGES),
    MetricName("reward/*/std", "reward_std", "over the trajectories of a role", _ADVANTAGES),
    MetricName("reward/*/min", "reward_min", "the smallest of a role", _ADVANTAGES),
    MetricName("reward/*/max", "reward_max", "the largest of a role", _ADVANTAGES),
    MetricName("batch/*/fractions/effective", "zero_variance_share",
        "1 - the share of groups of two or more whose rewards differ", _ADVANTAGES, factor=-1, offset=1),
    MetricName("advantage/*/mean", "advantage", "mean over the trajectories of a role", _ADVANTAGES),
    MetricName("advantage/*/min", "advantage_min", "the smallest of a role", _ADVANTAGES),
    MetricName("advantage/*/max", "advantage_max", "the largest of a role", _ADVANTAGES),
    MetricName("train/entropy", "entropy", "minus the mean log-prob of the sampler over action tokens", _TINKER),
    MetricName("train/kl_sample_train_v1", "sampler_kl", "mean over action tokens of sampler minus trainer log-prob",
        _TINKER),
    MetricName("batch/step_response_length/mean", "response_length", "mean over steps of trajectories",
        "rllm/trainer/tinker/transform.py"),
    MetricName("progress/lr", "learning_rate", "of the step", _TINKER),
)
# fmt: on

"""What tinker-cookbook's RL loop writes to metrics.jsonl. Read: 0.1 to 0.5.5.

`env/all/` is of all groups of the batch, `env/TAG/` of those of a tag. `optim/entropy` is an estimate, minus the mean
log-prob of the sampled tokens; there is no gradient norm and no loss.
"""

from rolloutdoctor.metric_names.name import MetricName

_KL = "tinker_cookbook/rl/metrics.py, compute_kl_sample_train"
_ENV = "tinker_cookbook/rl/metric_util.py, compute_trajectory_metrics"
_TRAIN = "tinker_cookbook/rl/train.py"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("env/all/reward/total", "reward", "mean over trajectories of the total reward", _ENV),
    MetricName("env/all/by_group/frac_mixed", "zero_variance_share", "1 - the share of groups of equal rewards", _ENV,
        factor=-1, offset=1),
    MetricName("optim/entropy", "entropy", "minus the mean log-prob of the sampler over action tokens", _KL),
    MetricName("kl_policy_base", "kl", "mean over action tokens of sampler minus base log-prob",
        "tinker_cookbook/rl/metrics.py, incorporate_kl_penalty"),
    MetricName("teacher_kl", "teacher_kl", "mean over action tokens of sampler minus teacher log-prob",
        "tinker_cookbook/distillation/train_on_policy.py, incorporate_kl_penalty"),
    MetricName("env/all/ac_tokens_per_turn", "response_length",
        "action tokens over turns: of a turn, not of a trajectory", _ENV),
    MetricName("env/all/turns_per_episode", "turns", "mean over trajectories", _ENV),
    MetricName("optim/lr", "learning_rate", "of the step", _TRAIN),
    MetricName("optim/kl_sample_train_v1", "sampler_kl", "mean over action tokens of sampler minus trainer log-prob",
        _KL),
    MetricName("env/all/total_episodes", "samples", "trajectories of the batch", _ENV),
    MetricName("time/total", "step_time", "seconds of the iteration",
        "tinker_cookbook/utils/trace.py, get_timing_metrics"),
)
# fmt: on

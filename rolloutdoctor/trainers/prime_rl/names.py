"""What prime-rl logs: the trainer's numbers and the orchestrator's. Read: 0.3 to 0.8 and main of 2026-08.

The trainer's are over all ranks. `all` is what was sampled; `effective`, what was shipped, leaves out groups without an
advantage, so that its reward is not the policy's. There is no KL from a reference.
"""

from rolloutdoctor.metric_names.name import MetricName

_TRAIN = "src/prime_rl/trainer/rl/train.py, train"
_LOSS = "src/prime_rl/trainer/rl/loss.py"
_ORCHESTRATOR = "src/prime_rl/orchestrator/orchestrator.py"
_OLD_METRICS = "src/prime_rl/orchestrator/metrics.py"
_METRICS = "src/prime_rl/orchestrator/metrics.py, to_wandb"

# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("train/agg/all/*/reward/mean", "reward", "mean over the traces of an agent", _METRICS, "0.8"),
    MetricName("train/agg/all/reward/mean", "reward", "mean over rollouts", _METRICS, "0.7", "0.8"),
    MetricName("reward/all/mean", "reward", "mean over problems of the mean over their rollouts", _OLD_METRICS, "0.5",
        "0.7"),
    MetricName("reward/mean", "reward", "mean over rollouts", _ORCHESTRATOR, until="0.5"),
    MetricName("train/agg/all/*/solved_some", "zero_variance_share",
        "1 - the share of groups of only 0 or only 1; groups of any other equal reward are not in it", _METRICS, "0.8",
        factor=-1, offset=1, lower_bound=True),
    MetricName("train/agg/all/solved_some", "zero_variance_share",
        "1 - the share of groups of only 0 or only 1; groups of any other equal reward are not in it", _METRICS, "0.7",
        "0.8", factor=-1, offset=1, lower_bound=True),
    MetricName("zero_advantage", "zero_variance_share",
        "share of the rollouts whose advantages are all 0, of which the console prints the count; a filter before it "
        "takes its own", "src/prime_rl/orchestrator/filters.py, apply_filters", lower_bound=True),
    MetricName("entropy/all/mean", "entropy", "mean over the trained tokens of all ranks", _TRAIN, "0.6"),
    MetricName("entropy/mean", "entropy", "mean over the trained tokens of all ranks", _TRAIN, until="0.6"),
    MetricName("loss/mean", "loss", "the step's loss over the number of micro-batches of all ranks", _TRAIN),
    MetricName("optim/grad_norm", "grad_norm", "L2 norm before clipping, of the summed gradient", _TRAIN),
    MetricName("train/agg/all/num_output_tokens/mean", "response_length", "mean over episodes of their sampled tokens",
        _METRICS, "0.7"),
    MetricName("decode_len/all/mean", "response_length", "mean over problems of the mean over their rollouts",
        _OLD_METRICS, "0.5", "0.7"),
    MetricName("completion_len/mean", "response_length", "mean over problems of the mean over their rollouts",
        _ORCHESTRATOR, until="0.5"),
    MetricName("train/agg/all/num_output_tokens/max", "response_length_max", "of an episode", _METRICS, "0.7"),
    MetricName("train/agg/all/*/is_truncated/mean", "truncated_share", "share of the traces of an agent", _METRICS,
        "0.8"),
    MetricName("train/agg/all/is_truncated/mean", "truncated_share", "share of rollouts", _METRICS, "0.7", "0.8"),
    MetricName("is_truncated/all/mean", "truncated_share", "mean over problems of the share of their rollouts",
        _OLD_METRICS, "0.5", "0.7"),
    MetricName("is_truncated/mean", "truncated_share", "mean over problems of the share of their rollouts",
        _ORCHESTRATOR, until="0.5"),
    MetricName("optim/lr", "learning_rate", "of the first parameter group", _TRAIN),
    MetricName("mismatch_kl/all/mean", "sampler_k3",
        "mean over sampled tokens of r - log r - 1, r trainer over sampler", _TRAIN, "0.6"),
    MetricName("mismatch_kl/mean", "sampler_k3", "mean over rows of the mean over their tokens of r - log r - 1", _LOSS,
        until="0.6"),
    MetricName("off_policy/mean", "version_lag", "mean over shipped episodes of the steps since they were sampled",
        _ORCHESTRATOR, "0.8.1"),
    MetricName("off_policy_level/all/mean", "version_lag", "mean over the rollouts in flight",
        "src/prime_rl/orchestrator/scheduler.py", "0.5", "0.6"),
    MetricName("batch/off_policy_level/mean", "version_lag", "mean over the rollouts in flight",
        "src/prime_rl/orchestrator/scheduler.py", until="0.5"),
    MetricName("dispatcher/off_policy_level_mean", "version_lag", "mean over the rollouts in flight",
        "src/prime_rl/orchestrator/dispatcher.py", "0.6", "0.8.1"),
    MetricName("progress/tokens", "tokens", "prompt and response tokens of all rollouts of the step", _ORCHESTRATOR),
    MetricName("progress/total_tokens", "tokens_seen", "the same of the run so far", _ORCHESTRATOR),
    MetricName("progress/rollouts", "samples", "rollouts of the step", _ORCHESTRATOR, "0.7"),
    MetricName("progress/samples", "samples", "rollouts of the step", _ORCHESTRATOR, until="0.7"),
    MetricName("time/step", "step_time", "seconds of a step of the trainer, or of the orchestrator in its own log",
        _TRAIN),
)
# fmt: on

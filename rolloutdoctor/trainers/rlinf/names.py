"""What RLinf logs: tables of its embodied runner, a progress bar of the reasoning one, TensorBoard. Read: a3816b5.

The console leaves `env/`, `rollout/` and `train/` out. The reasoning runner logs updates below `actor/training/`.
"""

from rolloutdoctor.metric_names.name import MetricName

_LOSS = "rlinf/algorithms/losses.py, compute_ppo_actor_loss"
_ROLLOUT = "rlinf/utils/metric_utils.py, compute_rollout_metrics"
_MATH = "rlinf/utils/distributed.py, compute_rollout_metrics"
_WORKER = "rlinf/workers/actor/fsdp_actor_worker.py, run_training"


def _of_update(name: str, quantity: str, definition: str, source: str, factor: float = 1.0) -> tuple[MetricName, ...]:
    prefixes = ("[train/]", "actor/training/")
    return tuple(
        MetricName(f"{prefix}actor/{name}", quantity, definition, source, factor=factor) for prefix in prefixes
    )


# fmt: off
NAMES: tuple[MetricName, ...] = (
    MetricName("[rollout/]rewards", "reward", "mean over responses, or over the valid steps of the episodes", _ROLLOUT),
    MetricName("[env/]success_once", "accuracy", "share of the episodes that succeed", "rlinf/envs"),
    MetricName("[rollout/]advantages_mean", "advantage", "mean over the valid cells", _ROLLOUT),
    MetricName("[rollout/]advantages_min", "advantage_min", "the smallest of the valid cells", _ROLLOUT),
    MetricName("[rollout/]advantages_max", "advantage_max", "the largest of the valid cells", _ROLLOUT),
    MetricName("[rollout/]response_length", "response_length", "mean over responses", _MATH),
    MetricName("[rollout/]fraction_of_samples_properly_ended", "truncated_share",
        "1 - the share of responses that ended", _MATH, factor=-1, offset=1),
    *_of_update("kl_loss", "kl", "as the loss, without its coefficient", _WORKER),
    *_of_update("entropy_loss", "entropy", "as the loss, of the entropy, positive; 0 without a bonus", _WORKER),
    *_of_update("policy_loss", "policy_loss", "the policy term", _LOSS),
    *_of_update("grad_norm", "grad_norm", "before clipping", _WORKER),
    *_of_update("clip_fraction", "clip_fraction", "share of tokens whose clipped term is the larger", _LOSS),
    *_of_update("approx_kl", "ppo_kl", "mean over the mask of old minus new log-prob", _LOSS),
    *_of_update("ratio", "ratio", "mean over the mask of new over old", _LOSS),
    *_of_update("lr", "learning_rate", "of the first parameter group", _WORKER),
)
# fmt: on

"""verl's `algorithm.rollout_correction`: its options, what they mean, and its metrics."""

import math
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.errors import CannotComputeError, UsageError
from rolloutdoctor.objective import ImportanceWeights, Rejection, RolloutCorrection
from rolloutdoctor.trainers.options import Config, Option

if TYPE_CHECKING:
    from rolloutdoctor.evaluation import Evaluation

_PREFIX = "algorithm.rollout_correction"
_IS, _RS = f"{_PREFIX}.rollout_is", f"{_PREFIX}.rollout_rs"
_LEVELS = ("token", "sequence")
BYPASS = f"{_PREFIX}.bypass_mode"

STATISTICS = (
    *(f"{over}_k{k}" for over in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)
"""What rejects tokens and rows."""

OPTIONS = (
    Option(_IS, "word", None, "importance weights of the policy term, null: none", choices=_LEVELS, optional=True),
    Option(
        f"{_IS}_threshold",
        "any",
        2.0,
        "their upper bound, or lower_upper: outside of it they are 0",
        optional=True,
        only_with={_IS: _LEVELS},
    ),
    Option(f"{_IS}_batch_normalize", "flag", False, "divide them by their mean", only_with={_IS: _LEVELS}),
    Option(_RS, "word", None, f"which tokens or rows are rejected: {', '.join(STATISTICS)}, or several", optional=True),
    Option(
        f"{_RS}_threshold",
        "any",
        None,
        "one bound or one for each, separated by commas; lower_upper of sampler over trainer for k1",
        optional=True,
        decides=False,
    ),
    Option(BYPASS, "flag", False, "take the sampler's log-probs for the old ones, and correct for nothing"),
)


def correction(config: Config) -> RolloutCorrection:
    """Build the rollout correction; in bypass mode verl skips it.

    Raises:
        UsageError: if verl itself refuses the options.
    """
    bounds = rejections(config)
    if config[BYPASS]:
        return RolloutCorrection()
    return RolloutCorrection(weights=weights(config), rejects=config[_RS] is not None, rejections=bounds)


def weights(config: Config, prefix: str = _PREFIX) -> ImportanceWeights | None:
    """The importance weights that the options under `prefix` ask for."""
    rollout_is = f"{prefix}.rollout_is"
    threshold = config[f"{rollout_is}_threshold"]
    if config[rollout_is] is None or threshold is None:
        return None
    level: Literal["token", "sequence"] = "token" if config.word(rollout_is) == "token" else "sequence"
    low, high = _bounds(str(threshold), f"{rollout_is}_threshold")
    normalised = bool(config[f"{rollout_is}_batch_normalize"])
    return ImportanceWeights(level=level, high=high, low=low, normalised=normalised)


def rejections(config: Config, prefix: str = _PREFIX) -> tuple[Rejection, ...]:
    """The bounds of the rejections that the options under `prefix` ask for; none where they are not known."""
    rollout_rs = f"{prefix}.rollout_rs"
    if config[rollout_rs] is None:
        return ()
    names = list(dict.fromkeys(part.strip() for part in config.word(rollout_rs).split(",") if part.strip()))
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise UsageError(f"{rollout_rs} = {config[rollout_rs]}: expected one or more of {', '.join(STATISTICS)}")
    value = config[f"{rollout_rs}_threshold"]
    if value is None:
        return ()  # The run's mask is known all the same.
    thresholds = [part.strip() for part in str(value).split(",") if part.strip()]
    if len(thresholds) not in (1, len(names)):
        raise UsageError(
            f"{rollout_rs} = {config[rollout_rs]} needs one bound or {len(names)} in {rollout_rs}_threshold, "
            "as verl does"
        )
    return tuple(
        _rejection(name, text) for name, text in zip(names, thresholds * (len(names) // len(thresholds)), strict=True)
    )


def _rejection(name: str, text: str) -> Rejection:
    """The bounds of a statistic: k1 is a log-ratio of sampler over trainer, and its bounds are of the ratio."""
    low, high = _bounds(text, f"{_RS}_threshold")
    if not name.endswith("k1"):
        if low is not None:
            raise UsageError(f"{_RS}_threshold = {text}: {name} takes one upper bound")
        return Rejection(statistic=name, high=high)
    low = 1.0 / high if low is None else low
    if low > high:
        raise UsageError(
            f"{_RS}_threshold = {text}: {name} needs a lower bound up to the upper one ({low:g}, {high:g})"
        )
    return Rejection(statistic=name, high=math.log(high), low=math.log(low))


def _bounds(text: str, option: str) -> tuple[float | None, float]:
    """Read ``upper`` or ``lower_upper``."""
    first, separated, second = text.strip().partition("_")
    try:
        low, high = (float(first), float(second)) if separated else (None, float(first))
    except ValueError:
        raise UsageError(f"{option} = {text}: expected a number, or two as in 0.5_2.0") from None
    if not high > 0 or (low is not None and not 0 < low <= high):
        raise UsageError(f"{option} = {text}: expected bounds above 0, the lower one first")
    return low, high


def metrics(evaluation: "Evaluation") -> dict[str, float]:
    """`rollout_corr/*`, where the step has the log-probs of the sampler and the mask before rejection."""
    from rolloutdoctor.corrections.importance import importance_metrics, importance_weights
    from rolloutdoctor.corrections.mismatch import mismatch_metrics
    from rolloutdoctor.corrections.rejection import rejection_metrics
    from rolloutdoctor.needs import mask_before_rejection
    from rolloutdoctor.reward_pass import log_ratios

    batch, objective = evaluation.batch, evaluation.objective
    if objective.surrogate.old != "old_log_probs":
        return {}  # bypass mode: verl computes none before the loss
    if not batch.has("rollout_log_probs", "old_log_probs", mask_before_rejection(objective)):
        return {}
    try:
        ratios = log_ratios(batch, evaluation.dtype)
    except CannotComputeError:
        return {}
    found: dict[str, float] = {}
    rule = objective.correction.weights
    if rule is not None:
        found |= importance_metrics(ratios, rule, importance_weights(ratios, rule))
    if objective.correction.rejections:
        found |= rejection_metrics(ratios, objective.correction.rejections)
    trainer_T, sampler_T = (batch.column(name).to(evaluation.dtype) for name in ("old_log_probs", "rollout_log_probs"))
    found |= mismatch_metrics(ratios, trainer_T, sampler_T)
    return {f"rollout_corr/{name}": value for name, value in found.items()}

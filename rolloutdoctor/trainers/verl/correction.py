"""verl's `algorithm.rollout_correction`: its options, what they mean, and its metrics."""

import math
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.corrections import ImportanceWeights, Rejection, RolloutCorrection
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.trainers.options import Config, Option

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.formulas.corrections.masked import LogRatios

PREFIX = "algorithm.rollout_correction"
_IS, _RS = f"{PREFIX}.rollout_is", f"{PREFIX}.rollout_rs"
_LEVELS = ("token", "sequence")
BYPASS = f"{PREFIX}.bypass_mode"
LOSS_TYPE = f"{PREFIX}.loss_type"

STATISTICS = (
    *(f"{over}_k{k}" for over in ("token", "seq_sum", "seq_mean") for k in (1, 2, 3)),
    "seq_max_k2",
    "seq_max_k3",
)
"""Statistics that tokens and rows are rejected by."""

OPTIONS = (
    Option(_IS, "word", None, "importance weights of the policy term, null: none", choices=_LEVELS, since="0.6.1"),
    Option(
        f"{_IS}_threshold",
        "any",
        2.0,
        "upper bound of the importance weights, or lower_upper: weights outside are set to 0",
        optional=True,
        only_with={_IS: _LEVELS},
    ),
    Option(
        f"{_IS}_batch_normalize", "flag", False, "divide the importance weights by their mean", only_with={_IS: _LEVELS}
    ),
    Option(_RS, "word", None, f"statistic for rejecting tokens or rows: {', '.join(STATISTICS)}, or several"),
    Option(
        f"{_RS}_threshold",
        "any",
        None,
        "one bound, or one per statistic, separated by commas; for k1 lower_upper of the ratio; no default",
        decides=False,
    ),
    Option(
        LOSS_TYPE,
        "word",
        "ppo_clip",
        "has no effect, because the workers exist before it is read; the loss uses the option of this name under "
        "actor.policy_loss, with loss_mode = bypass_mode",
        choices=("ppo_clip", "reinforce"),
        decides=False,
    ),
    Option(BYPASS, "flag", False, "use the sampler's log-probs as old log-probs, without a rollout correction"),
)


def correction(config: Config) -> RolloutCorrection:
    """Build the rollout correction; in bypass mode verl skips it, and looks at none of its options.

    Raises:
        UsageError: if verl itself refuses the options.
    """
    if config[BYPASS]:
        return RolloutCorrection()
    return RolloutCorrection(weights=weights(config), rejects=config[_RS] is not None, rejections=rejections(config))


def weights(config: Config, prefix: str = PREFIX) -> ImportanceWeights | None:
    """The importance weights that the options under `prefix` ask for."""
    rollout_is = f"{prefix}.rollout_is"
    threshold = config[f"{rollout_is}_threshold"]
    if config[rollout_is] is None or threshold is None:
        return None
    level: Literal["token", "sequence"] = "token" if config.word(rollout_is) == "token" else "sequence"
    low, high = weight_bounds(threshold, f"{rollout_is}_threshold")
    normalised = bool(config[f"{rollout_is}_batch_normalize"])
    return ImportanceWeights(level=level, high=high, low=low, normalised=normalised)


def rejections(config: Config, prefix: str = PREFIX) -> tuple[Rejection, ...]:
    """The bounds of the rejections that the options under `prefix` ask for."""
    rollout_rs = f"{prefix}.rollout_rs"
    if config[rollout_rs] is None:
        return ()
    return rejection_rules(config.word(rollout_rs), config[f"{rollout_rs}_threshold"], rollout_rs)


def weight_bounds(value: object, option: str) -> tuple[float | None, float]:
    """Read the bounds of importance weights: ``upper``, or ``lower_upper``.

    Accepts and refuses what verl's ``_parse_rollout_is_threshold`` does, NaN and infinity included.

    Raises:
        UsageError: for anything else.

    >>> weight_bounds("0.5_5", "rollout_is_threshold")
    (0.5, 5.0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise UsageError(f"{option} = {value!r}: expected a number, or two as in 0.5_2.0")
    low, high = _numbers(value, option)
    if high <= 0 or (low is not None and (low <= 0 or low > high)):
        raise UsageError(f"{option} = {value}: expected bounds above 0, the lower one first")
    return low, high


def rejection_rules(names: str, value: object, option: str) -> tuple[Rejection, ...]:
    """Read statistics separated by commas and their bounds: one for all of them, or one for each.

    k1 is a log-ratio of sampler over trainer, and its bounds ``lower_upper`` are of the ratio; ``upper`` alone is
    ``1/upper_upper``. The other statistics take an upper bound. Accepts and refuses what verl's
    ``compute_rollout_rejection_mask`` does, NaN and infinity included.

    Args:
        names: value of the option.
        value: value of the option with ``_threshold``.
        option: name of the option.

    Raises:
        UsageError: for anything else.

    >>> rejection_rules("token_k2,seq_max_k3", 0.5, "rollout_rs")[1]
    Rejection(statistic='seq_max_k3', high=0.5, low=None)
    """
    chosen = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    if not chosen or not set(chosen) <= set(STATISTICS):
        raise UsageError(f"{option} = {names}: expected one or more of {', '.join(STATISTICS)}")
    if value is None:
        raise UsageError(f"{option} = {names} needs {option}_threshold, and so does verl")
    if not isinstance(value, int | float | str):
        raise UsageError(
            f"{option}_threshold = {value!r}: expected a number, or a text with one bound or {len(chosen)} separated "
            "by commas"
        )
    parts = [part.strip() for part in str(value).split(",") if part.strip()]
    if len(parts) not in (1, len(chosen)):
        raise UsageError(f"{option} = {names} needs one bound or {len(chosen)} in {option}_threshold, as verl does")
    if len(parts) == 1:
        parts = parts * len(chosen)
    return tuple(_rejection(name, text, f"{option}_threshold") for name, text in zip(chosen, parts, strict=True))


def _rejection(name: str, text: str, option: str) -> Rejection:
    low, high = _numbers(text, option)
    if not name.endswith("k1"):
        if low is not None:
            raise UsageError(f"{option} = {text}: {name} takes one upper bound")
        if high <= 0:
            raise UsageError(f"{option} = {text}: {name} needs a bound above 0")
        return Rejection(statistic=name, high=high)
    if low is None and high != 0:
        low = 1.0 / high
    if low is None or low <= 0 or high <= 0:
        raise UsageError(f"{option} = {text}: {name} needs bounds above 0 whose inverses are above 0")
    if low > high:
        raise UsageError(f"{option} = {text}: {name} needs a lower bound up to the upper one ({low:g}, {high:g})")
    return Rejection(statistic=name, high=math.log(high), low=math.log(low))


def _numbers(value: float | str, option: str) -> tuple[float | None, float]:
    """Read ``upper`` or ``lower_upper``; Python reads underscores inside a number, so ``1_2_3`` is 1 and 23."""
    first, separated, second = value.partition("_") if isinstance(value, str) else (value, "", "")
    try:
        return (float(first), float(second)) if separated else (None, float(first))
    except (ValueError, OverflowError):
        raise UsageError(f"{option} = {value}: expected a number, or two as in 0.5_2.0") from None


def metrics(evaluation: "Evaluation") -> dict[str, float]:
    """`rollout_corr/*`, where the step has the log-probs of the sampler and the mask before rejection."""
    from rolloutdoctor.formulas.corrections.importance import importance_metrics, importance_weights
    from rolloutdoctor.formulas.corrections.mismatch import mismatch_metrics
    from rolloutdoctor.formulas.corrections.rejection import rejection_metrics

    columns = _before_the_loss(evaluation)
    if columns is None:
        return {}
    ratios, trainer_T, sampler_T = columns
    correction = evaluation.objective.correction
    metrics: dict[str, Tensor] = {}
    if correction.weights is not None:
        weights = importance_weights(ratios, correction.weights)
        metrics |= importance_metrics(ratios, correction.weights, weights)
    if correction.rejections:
        metrics |= rejection_metrics(ratios, correction.rejections)
    metrics |= mismatch_metrics(ratios, trainer_T, sampler_T)
    return {f"rollout_corr/{name}": float(x_M) for name, x_M in metrics.items()}


def probabilities(evaluation: "Evaluation") -> dict[str, float]:
    """`training/rollout_probs_diff_*` and their correlation, on the same columns."""
    from rolloutdoctor.formulas.corrections.mismatch import probability_metrics

    columns = _before_the_loss(evaluation)
    return {} if columns is None else {f"training/{name}": x for name, x in probability_metrics(*columns).items()}


def _before_the_loss(evaluation: "Evaluation") -> "tuple[LogRatios, Tensor, Tensor] | None":
    """Log-ratios before rejection, and the log-probs of trainer and sampler; None in bypass mode or without columns.

    In bypass mode verl has no log-probs of the trainer before the loss.
    """
    from rolloutdoctor.evaluation.scores import log_ratios
    from rolloutdoctor.objective.required_columns import mask_before_rejection

    batch, objective = evaluation.batch, evaluation.objective
    if objective.surrogate.old != "old_log_probs":
        return None
    if not batch.has("rollout_log_probs", "old_log_probs", mask_before_rejection(objective)):
        return None
    try:
        ratios = log_ratios(batch, evaluation.dtype)
    except CannotComputeError:
        return None
    trainer_T, sampler_T = (batch.column(name).to(evaluation.dtype) for name in ("old_log_probs", "rollout_log_probs"))
    return ratios, trainer_T, sampler_T

"""The clip range of the ratio as a free number, solved on the logged loss of one step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import fsum, isfinite, log2

from rolloutdoctor.evaluation.evaluate import RowResult, evaluate
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.search.hypotheses.hypothesis import STATE, Family, Hypothesis, Seen, changing
from rolloutdoctor.search.hypotheses.loss_terms import CLIPPED

_WIDEST = {"clip_low": 1.0, "clip_high": 16.0}
_HALVINGS = 40
_ENOUGH_BITS = 8.0
"""Bits of evidence that are enough for a number: those of few digits are few."""
_ENOUGH_STEPS = 3
"""Steps from which on the others say whether a number is right that one of them gave."""


def _is(side: str, value: float) -> Hypothesis:
    words = "below" if side == "clip_low" else "above"

    return Hypothesis(
        name=f"{side.replace('_', '-')}-is-{value:g}",
        code="RDI014",
        stage="loss",
        words=f"the ratio is clipped at {value:g} {words} 1, and not as recorded",
        remedy=STATE,
        objective=changing("surrogate", **{side: value}),
        unclaimed=CLIPPED,
    )


def _with(step: Seen, side: str, value: float) -> Mapping[str, float]:
    """The metrics of a step with a clip range."""
    evaluation = step.evaluation

    def amend(part: RowResult) -> RowResult:
        rows = evaluation.rows
        return part if rows is None else replace(part, advantage_N=rows.advantage_N, edited_radius=rows.edited_radius)

    objective = changing("surrogate", **{side: value})(evaluation.objective)
    return step.trainer.metrics(
        evaluate(evaluation.batch, objective, dtype=evaluation.dtype, logged=step.logged, amend=amend)
    )


def _gap(trial: Sequence[Seen], side: str, name: str) -> Callable[[float], float]:
    """Distance of the loss above the logged one, for a clip range."""
    return lambda value: fsum(_with(step, side, value)[name] for step in trial) / len(trial) - trial[0].logged[name]


def _end(gap: Callable[[float], float], target: float, widest: float) -> float:
    """The clip range at which a loss that falls with it reaches a gap."""
    low, high = 0.0, widest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if gap(middle) > target else (low, middle)
    return high


def _interval(trial: Sequence[Seen], side: str) -> tuple[float, float] | None:
    """The clip ranges with which the logged loss follows within its radius; None if there are none, or no end."""
    first = trial[0]
    names = [name for name in first.logged if first.trainer.log.kind_of(name) in ("policy_loss", "loss")]
    if not names or any(each.evaluation.tokens is None for each in trial):
        return None
    name = max(names, key=lambda name: first.trainer.log.kind_of(name) == "policy_loss")
    recomputed = [each.trainer.metrics(each.evaluation).get(name) for each in trial]
    if any(value is None for value in recomputed):
        return None
    radius = max(
        float(metric_radius(each.evaluation, first.trainer.log.kind_of(name), value or 0.0))
        for each, value in zip(trial, recomputed, strict=True)
    )
    gap = _gap(trial, side, name)
    if not isfinite(radius) or not gap(0.0) > radius or not gap(_WIDEST[side]) < -radius:
        return None
    return _end(gap, radius, _WIDEST[side]), _end(gap, -radius, _WIDEST[side])


def _share_bits(trial: Sequence[Seen], side: str, value: float) -> float:
    """Return the evidence, in bits, of a logged share of clipped tokens for a clip range, of as many as are clipped."""
    if len(trial) > 1:
        return 0.0
    first = trial[0]
    names = [name for name in first.logged if first.trainer.log.kind_of(name) == "clip_share"]
    recorded, changed = first.trainer.metrics(first.evaluation), _with(first, side, value)
    bits = 0.0
    for name in (each for each in names if each in recorded and each in changed):
        radius = float(metric_radius(first.evaluation, "clip_share", changed[name]))
        if abs(first.logged[name] - changed[name]) <= radius < abs(first.logged[name] - recorded[name]):
            bits = max(bits, log2(max(first.logged[name] * first.evaluation.batch.tokens, 1.0)))
    return bits


def _solve(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    """The number of the fewest digits that the loss of a step leaves, if that says enough for it."""
    smallest = sorted(trials, key=lambda trial: sum(step.evaluation.batch.tokens for step in trial))
    for side in _WIDEST:
        intervals = ((trial, _interval(trial, side)) for trial in smallest[:2])
        trial, interval = next((pair for pair in intervals if pair[1] is not None), (None, None))
        if trial is None or interval is None:
            continue
        low, high = interval
        for digits in (1, 2, 3, 4, 6):
            near = float(f"{(low + high) / 2:.{digits}g}")
            if not low <= near <= high:
                continue
            # As many numbers of so many digits are there as powers of ten, and one in this many is as near as that.
            bits = log2(near / (high - low)) - digits * log2(10) if high > low else 0.0
            bits += _share_bits(trial, side, near)
            if bits >= _ENOUGH_BITS or len(trials) >= _ENOUGH_STEPS:
                yield _is(side, near)
            break


CLIP_RANGE = Family(
    name="clip-range",
    code="RDI014",
    stage="loss",
    words="the ratio is clipped at another number than the recorded one, which is solved",
    solve=_solve,
)

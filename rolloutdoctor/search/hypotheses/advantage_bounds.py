"""Hypotheses about bounds of advantages: logged values that pile up at the largest or the smallest of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.advantage_fits import Step, advantage_family, logged_steps, recomputed
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, Seen, changing

FEWEST = 2
"""Rows at a bound: one value is equal to itself."""


def _pile(steps: Sequence[Step], sign: int) -> float | None:
    """Return the bound at which values pile up above (sign 1) or below (-1), where the recomputed ones go on."""
    pairs = [(logged_N, *recomputed(evaluation)) for evaluation, logged_N in steps]
    logged, predicted, radius = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
    logged, predicted = sign * logged, sign * predicted
    finite = logged.isfinite()
    if not bool(finite.any()):
        return None
    bound = logged[finite].max()
    at_bound: Tensor = finite & (logged == bound)
    beyond = at_bound & (predicted > bound + radius)
    # Where bounds are the cause, no recomputed value beyond them was logged as another one.
    is_clear = bool((predicted[finite & ~at_bound] <= bound + radius[finite & ~at_bound]).all())
    return sign * float(bound) if is_clear and int(beyond.sum()) >= FEWEST else None


def _clamped(low: float | None, high: float | None) -> Hypothesis:
    ends = " and ".join(f"{end:g}" for end in (low, high) if end is not None)
    bounds = (-torch.inf if low is None else low, torch.inf if high is None else high)
    return Hypothesis(
        name="advantages-clamped",
        code="RDI014",
        stage="advantages",
        words=f"the advantages are clamped at {ends}, where logged values pile up",
        remedy="state the bounds among the options of the run, then check again",
        objective=changing("advantage", bounds=bounds),
    )


def _solve(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    steps = logged_steps(trials)
    if not steps:
        return
    low, high = _pile(steps, -1), _pile(steps, 1)
    if low is not None or high is not None:
        yield _clamped(low, high)


def _is_unbounded(objective: Objective) -> bool:
    return objective.advantage.bounds is None


ADVANTAGE_BOUNDS = advantage_family(
    "advantage-bounds",
    "RDI014",
    "the advantages are clamped, and no option says so",
    _solve,
    _is_unbounded,
)

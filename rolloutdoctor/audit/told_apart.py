"""Tell two formulas apart by what was logged: values of which they give different numbers."""

import math

from rolloutdoctor.audit.row_tally import ComparedRows, in_radii
from rolloutdoctor.audit.tally import ComparedValue

Compared = ComparedRows | ComparedValue


def told_apart(one: Compared, other: Compared) -> tuple[int, int, int]:
    """Count the logged values of a step of which two evaluations give numbers that no rounding makes equal.

    Values that a doubt keeps from proving anything are left out.

    Args:
        one: the values beside those of one evaluation.
        other: the same beside those of another one.

    Returns:
        How many there are, those that agree with the one, and those that agree with the other.
    """
    if isinstance(one, ComparedValue) and isinstance(other, ComparedValue):
        return _of_value(one, other)
    if isinstance(one, ComparedRows) and isinstance(other, ComparedRows) and len(one.compared) == len(other.compared):
        return _of_rows(one, other)
    return 0, 0, 0


def _of_value(one: ComparedValue, other: ComparedValue) -> tuple[int, int, int]:
    gap = abs(one.recomputed - other.recomputed)
    if not gap > one.radius + other.radius or not math.isfinite(gap):
        return 0, 0, 0
    first, second = one.tally(), other.tally()
    return (1, first.agree, second.agree) if first.compared and second.compared else (0, 0, 0)


def _of_rows(one: ComparedRows, other: ComparedRows) -> tuple[int, int, int]:
    mine, theirs = one.values[1], other.values[1]
    differs = ((mine - theirs).abs() > one.values[2] + other.values[2]) & one.compared & other.compared
    as_is, as_other = in_radii(*one.values) <= 1, in_radii(*other.values) <= 1
    told = differs & ~(one.doubted & ~as_is) & ~(other.doubted & ~as_other)
    return int(told.sum()), int((told & as_is).sum()), int((told & as_other).sum())

"""Tell two formulas apart by what was logged: values of which they give different numbers."""

import math

from rolloutdoctor.audit.row_tally import ComparedRows, in_radii
from rolloutdoctor.audit.tally import ComparedValue

Compared = ComparedRows | ComparedValue


def told_apart(left: Compared, right: Compared) -> tuple[int, int, int]:
    """Count the logged values of a step of which two evaluations give numbers that no rounding makes equal.

    Values that a doubt keeps from proving anything are left out.

    Args:
        left: the values beside those of one evaluation.
        right: the same beside those of another one.

    Returns:
        How many there are, those that agree with the one, and those that agree with the other.
    """
    if isinstance(left, ComparedValue) and isinstance(right, ComparedValue):
        return _of_value(left, right)
    if isinstance(left, ComparedRows) and isinstance(right, ComparedRows) and len(left.compared) == len(right.compared):
        return _of_rows(left, right)
    return 0, 0, 0


def _of_value(left: ComparedValue, right: ComparedValue) -> tuple[int, int, int]:
    gap = abs(left.recomputed - right.recomputed)
    if not gap > left.radius + right.radius or not math.isfinite(gap):
        return 0, 0, 0
    first, second = left.tally(), right.tally()
    return (1, first.agree, second.agree) if first.compared and second.compared else (0, 0, 0)


def _of_rows(left: ComparedRows, right: ComparedRows) -> tuple[int, int, int]:
    mine, theirs = left.values[1], right.values[1]
    differs = ((mine - theirs).abs() > left.values[2] + right.values[2]) & left.compared & right.compared
    as_is, as_other = in_radii(*left.values) <= 1, in_radii(*right.values) <= 1
    apart = differs & ~(left.doubted & ~as_is) & ~(right.doubted & ~as_other)
    return int(apart.sum()), int((apart & as_is).sum()), int((apart & as_other).sum())

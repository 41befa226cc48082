"""Numbers, shares, counts and lines of a log in words, as findings say them."""

import math
from collections.abc import Sequence
from itertools import pairwise

_TIMES = 10
"""Multiple from which on a share is no percentage any more."""


def percent(share: float | None) -> str:
    """A share for people: three significant digits, and a multiple from ten times on.

    >>> percent(0.01234), percent(None), percent(9.99), percent(10.0), percent(279.8)
    ('1.23 %', 'n/a', '999 %', '10 times', '280 times')
    """
    if share is None:
        return "n/a"
    return f"{share:,.0f} times" if _TIMES <= share < math.inf else f"{100 * share:.3g} %"


def deviation(value: float | None, true: float | None) -> str:
    """How far a number is from the true one, as a share of the true one.

    >>> deviation(0.0482, 0.0745), deviation(0.08, 0.05), deviation(14.0, 0.05), deviation(1.0, 0.0)
    ('35.3 % too low', '60 % too high', '280 times the true value', 'the true value is 0')
    """
    if value is None or true is None:
        return "n/a"
    if true == 0:
        return "the true value is 0"
    ratio = value / true
    if ratio >= _TIMES:
        return f"{ratio:,.0f} times the true value"
    if ratio < 0:
        return "of the other sign"
    return f"{percent(abs(ratio - 1))} too {'high' if ratio > 1 else 'low'}"


def number(value: float | None) -> str:
    """A number for people: three significant digits; a zero without its sign."""
    return "n/a" if value is None else f"{value + 0.0:.3g}"


def counted(count: float, noun: str) -> str:
    """A count with its noun.

    >>> counted(1, "group"), counted(2500, "row")
    ('1 group', '2,500 rows')
    """
    return f"{int(count):,} {noun}{'' if count == 1 else 's'}"


FEW_LINES = 2
"""Lines of a paste that may have gaps, which are no logging interval."""


def logged_lines(count: int, steps: Sequence[int], *, each_step: bool = False) -> str:
    """Some of the lines of a log in words: steps, or windows of several where all are so far apart.

    Args:
        count: how many are meant.
        steps: of all lines, in order.
        each_step: the trainer logs each step, so that others were left out of a paste.

    >>> logged_lines(2, [5, 10, 15, 20, 23]), logged_lines(1, [1, 2, 3]), logged_lines(3, [3, 50, 90, 97])
    ('2 windows of 5 steps', '1 step', '3 steps')
    """
    gaps = [after - before for before, after in pairwise(steps)]
    # Of two lines nobody knows what lies between them, and the last line of a run comes where the run ends.
    is_even = len(steps) > FEW_LINES and min(gaps[:-1]) == max(gaps[:-1]) >= gaps[-1] > 0
    if each_step or not is_even or gaps[0] < 2:
        return counted(count, "step")
    return f"{counted(count, 'window')} of {gaps[0]} steps"

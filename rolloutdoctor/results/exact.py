"""Sums, means and ratios of Python floats."""

import math
from collections.abc import Sequence

_SMALLER = 2.0**-64


def total(values: Sequence[float]) -> float:
    """Return the sum, rounded once; infinite where it is beyond a float, NaN where it is not defined.

    >>> total([1e308, 1e308, -1e308]), total([1e308, 1e308]), total([0.1] * 10)
    (1e+308, inf, 1.0)
    """
    return _scaled(values, 1)


def mean(values: Sequence[float]) -> float:
    """Return the mean, NaN of nothing.

    >>> mean([1.5e308, 1.5e308]), mean([])
    (1.5e+308, nan)
    """
    return _scaled(values, len(values)) if values else math.nan


def ratio(part: float, whole: float) -> float | None:
    """Return ``part / whole``, or None where there is no whole (a share of nothing is not 0) or no finite result."""
    quotient = part / whole if whole else math.nan
    return quotient if math.isfinite(quotient) else None


def _scaled(values: Sequence[float], count: int) -> float:
    try:
        return math.fsum(values) / count
    except OverflowError:
        # A partial sum was too large; a power of two takes nothing from numbers of this size.
        return math.fsum(value * _SMALLER for value in values) / count / _SMALLER
    except ValueError:
        # Infinities of both signs.
        return math.nan

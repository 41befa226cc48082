"""Whole numbers as factors between numbers that were rounded: counts of micro-batches, ranks or accumulation steps."""

import math
from collections.abc import Iterable

LARGEST_COUNT = 1024
"""Of micro-batches, ranks or accumulation steps."""

CHANCE = 2.0**-6
"""Width of an interval of counts up to which the whole number in it is no coincidence, if several values have it."""

CHANCE_OF_ONE = 2.0**-9
"""The same of a single value: of many metrics some ratio is close to a whole number."""

SINGLE_STEP = 2.0**-22
"""What float32 arithmetic loses of a logged mean, as a share of it, where its terms are not known."""


def quotients(value: float, value_radius: float, of: float, of_radius: float) -> tuple[float, float]:
    """Return the least and the largest quotient of two numbers, each within a radius.

    Where the divisor may be 0 within its radius, it is taken as it is.

    >>> quotients(8.0, 0.0, 1.0, 0.0)
    (8.0, 8.0)
    """
    if of_radius >= abs(of):
        value_radius, of_radius = value_radius + of_radius, 0.0
    ends = [(value + a * value_radius) / (of + b * of_radius) for a in (-1, 1) for b in (-1, 1)]
    return min(ends), max(ends)


def whole(low: float, high: float, chance: float = CHANCE) -> tuple[int, bool] | None:
    """Return the whole number of 2 or more in an interval of factors, and whether it divides.

    None where there is none, and where the interval is so wide that it would hold one by `chance`. Counts of ranks and
    micro-batches are mostly powers of two, which are rarer: an interval that is too wide for other counts may hold one.

    >>> whole(7.9999, 8.0001), whole(0.12499, 0.12501), whole(1.37, 1.37), whole(7.6, 8.4)
    ((8, False), (8, True), None, None)
    >>> whole(15.98, 16.02), whole(16.98, 17.02)
    ((16, False), None)
    """
    if not 0 < low <= high:
        return None
    for value, divides in ((high, False), (1 / low, True)):
        # One over the smallest numbers is infinite.
        count = math.floor(value * (1 + 1e-12)) if 2 <= value * (1 + 1e-12) < LARGEST_COUNT + 1 else 0
        width = value * (high - low) / high
        octaves = width / value / math.log(2) if count & (count - 1) == 0 else math.inf
        if count and min(width, 4 * octaves) <= chance and value - count <= width * (1 + 1e-12) + 1e-12 * value:
            return count, divides
    return None


def whole_quotient(pairs: Iterable[tuple[float, float]]) -> tuple[int, bool] | None:
    """Return the whole number that two series of logged numbers differ by in every step, as `whole` does.

    Args:
        pairs: number of the one and of the other series at each step, as they were printed.

    >>> whole_quotient([(1.077010, 0.033657)]), whole_quotient([(0.16, 0.01), (0.51234567, 0.0320216)])
    ((32, False), (16, False))
    >>> whole_quotient([(64, 2)]), whole_quotient([(1e-5, 1e-6)]), whole_quotient([(0.0, 0.0)])
    (None, None, None)
    """
    low, high, some = -math.inf, math.inf, 0
    for value, of in pairs:
        if not (math.isfinite(value) and math.isfinite(of)) or (value == 0) != (of == 0):
            return None
        if of:
            least, most = quotients(value, _printed(value), of, _printed(of))
            low, high, some = max(low, least), min(high, most), some + 1
    return whole(low, high, CHANCE if some > 1 else CHANCE_OF_ONE) if some else None


def _printed(value: float) -> float:
    """Return half a unit of the last printed digit of a number, or what float32 loses of it, if that is more."""
    mantissa, _, exponent = f"{value!r}".lower().partition("e")
    decimals = len(mantissa.rstrip("0").partition(".")[2])
    return max(float(10.0 ** (int(exponent or 0) - decimals)) / 2, SINGLE_STEP * abs(value))

"""Series of a few numbers: where they rise and stay, and whether they go with another series."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def rise(values: Sequence[float], *, factor: float, after: int) -> int | None:
    """Index from which on every value is at least `factor` times every value before; None if there is none.

    Args:
        values: in their order, not negative.
        factor: how far apart.
        after: fewest values from there on.

    >>> rise([1, 1.2, 9, 8, 9], factor=4, after=3)
    2
    """
    lows = list(values)
    for place in range(len(lows) - 2, -1, -1):
        lows[place] = min(lows[place], lows[place + 1])
    high = 0.0
    for place, (before, _) in enumerate(pairwise(values), 1):
        high = max(high, before)
        if place + after <= len(lows) and lows[place] >= factor * max(high, 1e-6):
            return place
    return None


def growth(values: Sequence[float]) -> tuple[float, float] | None:
    """Mean of the first two values and median of the last third; None of fewer than six.

    >>> growth([1, 3, 5, 5, 7, 9])
    (2.0, 8.0)
    """
    if len(values) < 6:
        return None
    return (values[0] + values[1]) / 2, median(values[-(len(values) // 3) :])


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1, equal values sharing the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0])
    [2.5, 1.0, 2.5]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            ranks[place] = (start + stop + 1) / 2
        start = stop
    return ranks


def spearman(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Correlation of the ranks of two series of equal length; None where either is constant.

    >>> spearman([1, 2, 3], [10, 20, 400])
    1.0
    """
    first, second = ranks(left), ranks(right)
    centre = (len(first) + 1) / 2
    product = sum((a - centre) * (b - centre) for a, b in zip(first, second, strict=True))
    squares = sum((a - centre) ** 2 for a in first) * sum((b - centre) ** 2 for b in second)
    return product / squares**0.5 if squares else None

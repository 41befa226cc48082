"""Slopes of contexts, counted in bins of their logarithm: the median, its interval, and how far they agree."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp, floor, sqrt

STEP = 0.01
"""Width of a bin, of the logarithm."""


@dataclass(frozen=True)
class Slopes:
    """What the slopes of many contexts say together.

    Attributes:
        contexts: how many.
        middle: the median.
        low: lower end of its 95 % interval, by order statistics, widened by half a bin.
        high: upper end.
        lowest: lower end of the same at four standard deviations.
        highest: upper end.
        one_sided: share of the contexts on the median's side of 1.
        near: share within a fifth of the median.
    """

    contexts: int
    middle: float
    low: float
    high: float
    lowest: float
    highest: float
    one_sided: float
    near: float

    def is_scaled(self, by_least: float) -> bool:
        """True if the sampler's logits are the trainer's times a factor, and at least so far from 1."""
        return (
            abs(self.middle - 1) >= by_least
            and (self.lowest > 1 or self.highest < 1)
            and self.one_sided >= 0.9
            and self.near >= 0.8
        )


def slopes_of(counts: Mapping[str, float]) -> Slopes | None:
    """Return what slopes say together, or None of nothing.

    Args:
        counts: bin of the logarithm to contexts; ``none`` counts contexts without a slope.

    >>> found = slopes_of({"35": 30, "36": 40, "37": 30})
    >>> round(found.middle, 3), found.one_sided, found.is_scaled(0.02)
    (1.433, 1.0, True)
    """
    total = int(sum(counts.values()))
    if not total or total == counts.get("none"):
        return None
    # Contexts without a slope are on neither side: they come first, where they can only weaken a verdict.
    ordered = [(-1000, int(counts.get("none", 0)))]
    ordered += sorted((int(name), int(count)) for name, count in counts.items() if name != "none")

    def at(rank: float) -> int:
        left = min(max(rank, 0), total - 1)
        for place, count in ordered:
            if left < count:
                return place
            left -= count
        return ordered[-1][0]

    def ends(deviations: float) -> tuple[float, float]:
        reach = deviations * sqrt(total) / 2
        low, high = at(floor(total / 2 - reach)), at(ceil(total / 2 + reach))
        return exp(STEP * (low - 0.5)), exp(STEP * (high + 0.5))

    place = at((total - 1) // 2)
    side = sum(count for each, count in ordered if each != -1000 and each * place > 0)
    near = sum(count for each, count in ordered if abs(each - place) <= 18)
    return Slopes(total, exp(STEP * place), *ends(2), *ends(4), side / total, near / total)


def common_factor(own: float, other: float, product: float) -> float | None:
    """Return the factor by which all numbers of one column are those of another; None if there is none, or it is 1.

    What is left of one after the best factor must be a hundredth of the squared differences, or less.

    Args:
        own: sum of the squares of the one.
        other: of the other.
        product: of the products.

    >>> common_factor(4 * 14, 14, 2 * 14), common_factor(14 + 12 + 3, 14, 14 + 6)
    (2.0, None)
    """
    apart = own - 2 * product + other
    if not other or apart <= 1e-6 * other or own - product**2 / other > 0.01 * apart:
        return None
    return product / other

"""Upper confidence bounds at 99.9 % (two-sided), of estimates that are normal, of shares, and of any median."""

from collections.abc import Sequence
from math import inf, sqrt

Z = 3.2905
"""Standard errors on either side."""


def reach(error: float, freedom: float) -> float:
    """Return the distance of the bound above an estimate: Z standard errors, times the first term of Student's t.

    Args:
        error: standard error.
        freedom: degrees of freedom of the error.

    >>> round(reach(1.0, 1e6), 2), round(reach(1.0, 20), 2)
    (3.29, 3.78)
    """
    return error * Z * (1 + (Z * Z + 1) / (4 * freedom)) if freedom > 0 else inf


def quantile_above_median(count: int) -> float:
    """Share of `count` draws, below which the bound of their median lies: the number below it is binomial."""
    return 0.5 + Z / (2 * sqrt(count)) if count else inf


def median_bound(values: Sequence[float]) -> float:
    """Bound of the median of a distribution from draws of it; infinite of fewer than 11.

    >>> median_bound(range(10)), median_bound(range(11)), median_bound(range(100))
    (inf, 10, 66)
    """
    place = quantile_above_median(len(values)) * len(values)
    return sorted(values)[int(place)] if place < len(values) else inf


def share_bound(count: float, total: float) -> tuple[float, float]:
    """Wilson's bounds of a share.

    >>> [round(each, 4) for each in share_bound(0, 100)]
    [0.0, 0.0977]
    """
    z, share = Z * Z / total, count / total
    middle, width = share + z / 2, sqrt(z * (share * (1 - share) + z / 4))
    return max(middle - width, 0.0) / (1 + z), (middle + width) / (1 + z)

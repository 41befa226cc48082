"""Correlations of ranks."""

import numpy as np
from numpy.typing import NDArray


def centred_ranks(values: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
    """Ranks less their mean, equal values sharing the mean of theirs.

    >>> centred_ranks(np.array([5, 1, 5])).tolist()
    [0.5, -1.0, 0.5]
    """
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    found: NDArray[np.float64] = (last - (counts - 1) / 2)[place] - (len(values) + 1) / 2
    return found


def correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float | None:
    """Spearman's correlation of two series of centred ranks; None where either is constant."""
    squares = float(one @ one) * float(other @ other)
    return float(one @ other) / squares**0.5 if squares else None


def partial_correlation(
    one: NDArray[np.float64], other: NDArray[np.float64], third: NDArray[np.float64]
) -> float | None:
    """The same with a third series partialled out; None where it leaves nothing of one of them.

    >>> one, third = centred_ranks(np.array([1, 2, 3, 4])), centred_ranks(np.array([1, 1, 1, 1]))
    >>> partial_correlation(one, one, third)
    1.0
    """
    whole, first, second = correlation(one, other), correlation(one, third), correlation(other, third)
    if whole is None or first is None or second is None:
        return whole
    rest = (1 - first**2) * (1 - second**2)
    return (whole - first * second) / rest**0.5 if rest > 1e-9 else None

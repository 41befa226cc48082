"""Fixed bins for sizes: four to each doubling, so that counts of any parts add up and give a median within a bin."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.ops.by_step import ByStep

BINS = 128
"""From 2 ** -22 to 2 ** 10; what is smaller or larger counts in the first or last bin."""

_FIRST = (127 - 22) * 4
"""Quarter of a doubling, as the upper bits of a float32 count them, at which the bins begin."""


def bin_of(size: Tensor) -> Tensor:
    """Index of the bin of each size, int32 in ``[0, BINS)``; sizes are finite and not negative.

    The upper bits of a float32 are its exponent and the first two digits of its mantissa: bins of one doubling end at
    1, 1.25, 1.5, 1.75 and 2 times a power of two, and no logarithm is taken.

    >>> bin_of(torch.tensor([0.0, 1.0, 1.2, 1.3, 2.0])).tolist()
    [0, 88, 88, 89, 92]
    """
    bits = size.float().contiguous().view(torch.int32) >> 21
    return (bits - _FIRST).clamp_(0, BINS - 1)


def bins_of(size: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
    """The same of numpy's values."""
    bits = size.astype(np.float32).view(np.int32) >> 21
    bits -= _FIRST
    return np.clip(bits, 0, BINS - 1, out=bits)


def edges(index: int) -> tuple[float, float]:
    """Lower and upper end of a bin.

    >>> edges(88), edges(91)
    ((1.0, 1.25), (1.75, 2.0))
    """
    power, quarter = divmod(index - 88, 4)
    return 2.0**power * (1 + quarter / 4), 2.0**power * (1 + (quarter + 1) / 4)


def middles(counts: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Median of what each row counts, as the centre of its bin: within an eighth of itself; 0 of nothing.

    Args:
        counts: ``[R, BINS]``.

    >>> middles(np.array([[0] * 88 + [1, 3] + [0] * 38, [0] * 128])).tolist()
    [1.375, 0.0]
    """
    reaches_half = 2 * counts.cumsum(axis=1) >= counts.sum(axis=1, keepdims=True)
    centre: NDArray[np.float64] = CENTRES[reaches_half.argmax(axis=1)]
    return centre


def medians(
    size_N: NDArray[np.float64], bin_N: NDArray[np.int32], counts: NDArray[np.float64], rows: ByStep
) -> NDArray[np.float64]:
    """Exact median of each step, ``[S]``, as `ByStep.median`: only sizes of the bins that hold it are put in order.

    Args:
        size_N: sizes of the rows.
        bin_N: their bins, from `bins_of`.
        counts: ``[S, BINS]``, how many sizes each bin holds.
        rows: by step.

    >>> rows, size_N = ByStep.of_sizes([3, 0, 2]), np.array([4.0, 1.0, 2.0, 1.0, 2.0])
    >>> medians(size_N, bins_of(size_N), rows.histogram(bins_of(size_N), BINS), rows).tolist()
    [2.0, nan, 1.5]
    """
    cumulative, runs = counts.cumsum(axis=1), rows.cpu.runs
    # Of an even number there are two in the middle.
    left, right = (rows.size - 1) // 2, rows.size // 2
    low, high = ((cumulative > rank[:, None]).argmax(axis=1).astype(np.int32) for rank in (left, right))
    is_near = (bin_N >= runs.spread(low)) & (bin_N <= runs.spread(high))
    near, cuts = size_N[is_near], rows.only(is_near).cpu.runs.cuts
    before = (cumulative - counts)[np.arange(len(rows)), low].astype(np.int64)
    median = np.full(len(rows), np.nan)
    for step in np.flatnonzero(rows.size):
        ordered = np.sort(near[cuts[step] : cuts[step + 1]])
        median[step] = (ordered[left[step] - before[step]] + ordered[right[step] - before[step]]) / 2
    return median


def quantile(counts: Sequence[float], share: float) -> float | None:
    """Size that a share of what was counted stays below, as if evenly spread in its bin; None of nothing.

    >>> quantile([0] * 88 + [2, 2] + [0] * 38, 0.5), quantile([0] * 88 + [2, 2] + [0] * 38, 0.25)
    (1.25, 1.125)
    """
    left = sum(counts) * share
    if not left:
        return None
    for index, count in enumerate(counts):
        if left <= count:
            low, high = edges(index)
            return low + (high - low) * left / count if index else 0.0
        left -= count
    raise AssertionError("a quantile lies in some bin")


CENTRES = np.array([0.0, *(sum(edges(index)) / 2 for index in range(1, BINS))])
"""Of the bins: the keys under which a step counts sizes."""

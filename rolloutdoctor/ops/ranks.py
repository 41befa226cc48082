"""Correlations of ranks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolloutdoctor.ops.by_step import ByStep


class StepRanks:
    """Correlations of ranks within each of several steps; 0 where a step leaves nothing to correlate."""

    def __init__(self, by_step: ByStep) -> None:
        """Take the rows by step, on the CPU."""
        self._by_step = by_step

    def centred(self, values: NDArray[np.number[Any]]) -> NDArray[np.float64]:
        """Ranks among the rows of the step, less their mean, ``[n]``; equal values share the mean of theirs.

        >>> StepRanks(ByStep.of_sizes([2, 3])).centred(np.array([2, 1, 5, 1, 5])).tolist()
        [0.5, -0.5, 0.5, -1.0, 0.5]
        """
        sizes = self._by_step.size
        return self._by_step.ranks(values) - ((sizes + 1) / 2).repeat(sizes)

    def correlation(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Spearman's correlation of two series of centred ranks, ``[S]``."""
        total = self._by_step.sum
        squares = total(left * left) * total(right * right)
        return total(left * right) / np.sqrt(np.where(squares > 0, squares, 1.0))

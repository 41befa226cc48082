"""`LagCells`: rows of several steps, gathered by step and version lag."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.lag_table import MOST_LAGS


class LagCells:
    """The rows of one step and lag are a cell; the C cells that have rows are in the order of steps and lags.

    Attributes:
        cell_N: the cell of each row, ``[N]`` int64.

    >>> import torch
    >>> cells = LagCells(torch.tensor([0, 1, 0, 0]), ByStep.of_sizes([3, 1]), [7, 8], np.array([True, False]))
    >>> cells.by_name(cells.sum(np.array([1.0, 2.0, 4.0, 8.0])))
    [{'7:0': 5.0, '7:1': 2.0}, {}]
    """

    def __init__(
        self, lag_N: Tensor | None, by_step: ByStep, numbers: Sequence[int], named_S: NDArray[np.bool_]
    ) -> None:
        """Gather rows.

        Args:
            lag_N: version lag of each row, ``[N]`` int64 below `MOST_LAGS`; None: all are 0.
            by_step: the rows by step.
            numbers: of the steps.
            named_S: steps whose cells have a name, ``[S]``.
        """
        place_N = by_step.step_N * MOST_LAGS
        place_N = place_N if lag_N is None else place_N + lag_N
        place_C, self.cell_N = np.unique(place_N.cpu().numpy(), return_inverse=True)
        self._names = [f"{numbers[step]}:{lag}" for step, lag in (divmod(one, MOST_LAGS) for one in place_C.tolist())]
        starts = place_C.searchsorted(np.arange(len(by_step)) * MOST_LAGS)
        stops = np.where(named_S, np.append(starts[1:], len(place_C)), starts)
        self._of_step = [slice(*ends) for ends in zip(starts.tolist(), stops.tolist(), strict=True)]

    def __len__(self) -> int:
        return len(self._names)

    def sum(self, x_N: NDArray[Any]) -> NDArray[np.float64]:
        """Sum over the rows of each cell, ``[C]``."""
        return np.bincount(self.cell_N, x_N, len(self)).astype(np.float64)

    def by_name(self, x_C: NDArray[Any]) -> list[dict[str, float]]:
        """The values of the cells of each step, under names like ``STEP:LAG``."""
        values = x_C.astype(np.float64).tolist()
        return [dict(zip(self._names[own], values[own], strict=True)) for own in self._of_step]

"""`ByStep`: values of rows, or of groups, reduced to one value for each of several steps."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.ops.segments import Runs

Floats = NDArray[np.float64]


class ByStep:
    """Rows of several steps, one step after another; S is the number of steps, and one step is no special case.

    What it returns is numpy's and on the CPU, whatever the device of the values. What a step gets does not depend on
    the other steps, to the bit.

    Attributes:
        runs: the rows by step.

    >>> rows = ByStep(Runs(torch.tensor([0, 2, 2, 3])))
    >>> rows.sum(torch.tensor([1.0, 2.0, 4.0])).tolist(), rows.high(torch.tensor([1.0, 2.0, 4.0])).tolist()
    ([3.0, 0.0, 4.0], [2.0, 0.0, 4.0])
    """

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def __len__(self) -> int:
        return len(self.runs)

    @cached_property
    def size(self) -> NDArray[np.int64]:
        """Rows of each step, ``[S]``."""
        return self.runs.lengths.cpu().numpy()

    @cached_property
    def step_N(self) -> Tensor:
        """The place of each row's step among the steps, ``[N]`` int64."""
        return self.runs.expand(torch.arange(len(self), device=self.runs.offsets.device))

    def sum(self, x_N: Tensor | NDArray[Any]) -> Floats:
        """Sum over the rows of each step, ``[S]``."""
        if isinstance(x_N, Tensor):
            if x_N.device.type != "cpu":
                return self.runs.total(x_N).cpu().numpy()
            x_N = x_N.numpy()
        return self.cpu.runs.sums(x_N)

    @property
    def cpu(self) -> "ByStep":
        """The same for values that are on the CPU, where the step itself may be on a GPU."""
        # It is not kept where it is this one: what holds itself lives until garbage is collected.
        return self if self.runs.offsets.device.type == "cpu" else self._copy

    @cached_property
    def _copy(self) -> "ByStep":
        return ByStep(Runs(self.runs.offsets.cpu()))

    def count(self, chosen_N: Tensor | NDArray[Any]) -> NDArray[np.int64]:
        """Count the chosen rows of each step, ``[S]``, from ``[N]`` bool; or sum whole numbers."""
        return self.sum(chosen_N).astype(np.int64)

    def any(self, chosen_N: Tensor | NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether a row of the step is chosen, ``[S]``."""
        return np.asarray(self.sum(chosen_N) > 0)

    def all(self, chosen_N: Tensor | NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether every row of the step is chosen, ``[S]``; of a step without rows it is true."""
        return np.asarray(self.sum(chosen_N) == self.size)

    def mean(self, x_N: Tensor | NDArray[Any]) -> Floats:
        """Mean over the rows of each step, ``[S]``; NaN for a step without rows."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.sum(x_N) / self.size, np.float64)

    def high(self, x_N: Tensor, empty: float = 0.0) -> Floats:
        """Largest value of each step, ``[S]``; NaN if there is one, `empty` for a step without rows."""
        return self.cpu.runs.extremes(x_N.cpu().numpy(), np.maximum, empty)

    def low(self, x_N: Tensor, empty: float = 0.0) -> Floats:
        """Smallest value of each step, ``[S]``; NaN if there is one, `empty` for a step without rows."""
        return self.cpu.runs.extremes(x_N.cpu().numpy(), np.minimum, empty)

    def expand(self, x_S: NDArray[Any] | Tensor) -> Tensor:
        """Give every row the value of its step: ``[S] -> [N]``."""
        values = torch.from_numpy(x_S) if isinstance(x_S, np.ndarray) else x_S
        return self.runs.expand(values.to(self.runs.offsets.device))

    def only(self, chosen_N: Tensor | NDArray[np.bool_]) -> "ByStep":
        """The chosen rows, ``[N]`` bool, by step: for values that were packed by ``x_N[chosen_N]``."""
        return ByStep.of_sizes(self.count(chosen_N), self.runs.offsets.device)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int] | NDArray[np.int64], device: torch.device | None = None) -> "ByStep":
        """Rows by step, given how many each step has."""
        runs = Runs.of_sizes(sizes)
        return cls(runs if device is None or device.type == "cpu" else Runs(runs.offsets.to(device)))

    def histogram(
        self, bin_N: NDArray[np.integer[Any]], bins: int, weight_N: NDArray[Any] | None = None
    ) -> NDArray[np.float64]:
        """Count the rows of each step by bin, or add up their weights, ``[S, bins]``; on the CPU.

        Args:
            bin_N: of each row, below `bins`.
            bins: how many there are.
            weight_N: of each row.
        """
        place_N = bin_N if len(self) == 1 else self.cpu.step_N.numpy() * bins + bin_N
        counts = np.bincount(place_N, weight_N, len(self) * bins).astype(np.float64, copy=False)
        return counts.reshape(len(self), bins)

    def ranks(self, x_N: NDArray[Any]) -> Floats:
        """Ranks of the rows of each step from 1, equal values sharing the mean of theirs, ``[N]``; on the CPU.

        >>> ByStep.of_sizes([3, 2]).ranks(np.array([3.0, 1.0, 3.0, 9.0, 8.0])).tolist()
        [2.5, 1.0, 2.5, 2.0, 1.0]
        """
        step_N = self.cpu.step_N.numpy()
        order = np.lexsort((x_N, step_N))
        first = np.flatnonzero(is_new(x_N[order], step_N))
        sizes = np.diff(first, append=len(order))
        rank_N = np.empty(len(order))
        rank_N[order] = (first + (sizes + 1) / 2).repeat(sizes)
        rank_N -= self.cpu.runs.spread(self.cpu.runs.cuts[:-1])
        return rank_N

    def at(self, places: NDArray[np.int64]) -> "ByStep":
        """Rows at some places in rising order, by step; on the CPU, for values that were packed by ``x_N[places]``."""
        return ByStep(self.cpu.runs.at(places))


def named_counts(
    x_SK: NDArray[Any], names: Sequence[str] | None = None, kept_SK: NDArray[np.bool_] | None = None
) -> list[dict[str, float]]:
    """Return the nonzero numbers of each step by the name of their column.

    Args:
        x_SK: ``[S, K]``.
        names: of the K columns; their places, if there are none.
        kept_SK: numbers to return, zero or not, in place of the nonzero ones.

    >>> named_counts(np.array([[0, 2], [1, 0]]))
    [{'1': 2.0}, {'0': 1.0}]
    """
    steps, places = np.nonzero(x_SK if kept_SK is None else kept_SK)
    split: list[dict[str, float]] = [{} for _ in range(len(x_SK))]
    for step, place, value in zip(steps.tolist(), places.tolist(), x_SK[steps, places].tolist(), strict=True):
        split[step][str(place) if names is None else names[place]] = float(value)
    return split


def is_new(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which rows differ from the one before in one of some keys, ``[n]``; the first one does.

    >>> is_new(np.array([0, 0, 0, 1]), np.array([5, 5, 7, 7])).tolist()
    [True, False, True, True]
    """
    differs = np.ones(len(keys[0]), bool)
    differs[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return differs

"""Reductions over runs of a packed tensor: the only place where raggedness is handled.

A run is ``x[offsets[i]:offsets[i + 1]]``. Offsets are int64, start at 0, never fall and end at ``len(x)``; they are
validated once, by `RolloutBatch`. Sums are float64 whatever the input is: a float32 sum over a long response loses
the digits that a difference of two losses needs.

On the CPU numpy works on the tensors' own memory: its sums are pairwise and vectorised, and its repeats and selections
cost a fraction of torch's. Either way the order of a sum is fixed.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FEW = 2**11
"""Of fewer values torch finds the extremes sooner; it takes thirty times as long for each value as numpy does."""


class Runs:
    """Runs that are reduced and filled many times: what the offsets say about them is worked out once.

    Attributes:
        offsets: ``[R+1]`` int64.
        cuts: the offsets as numpy's, on the CPU.
    """

    def __init__(self, offsets: Tensor) -> None:
        self.offsets = offsets
        self._on_cpu = offsets.device.type == "cpu"
        if self._on_cpu:
            cuts = self.cuts = offsets.numpy()
            self._end = int(cuts[-1])
            self._sizes = cuts[1:] - cuts[:-1]
            # Of an empty run numpy would give the value that follows it.
            self._filled = self._sizes > 0
            self._some_empty = not self._filled.all()
            self._starts = cuts[:-1][self._filled] if self._some_empty else cuts[:-1]

    @classmethod
    def of_lengths(cls, lengths: Tensor) -> "Runs":
        """Runs of some lengths, ``[R]`` int64, one after another."""
        return cls(offsets_of(lengths))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int] | NDArray[np.int64]) -> "Runs":
        """The same of lengths that are numpy's, on the CPU."""
        return cls(torch.from_numpy(cuts_of(sizes)))

    @cached_property
    def lengths(self) -> Tensor:
        """``[R]`` int64."""
        return torch.from_numpy(self._sizes) if self._on_cpu else self.offsets.diff()

    @cached_property
    def _count(self) -> type[np.unsignedinteger[Any]] | type[np.signedinteger[Any]]:
        """A count fits the integer that holds the longest run, and small integers add up fastest."""
        return np.uint16 if self._sizes.max(initial=0) < 2**16 else np.int64

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @cached_property
    def _places(self) -> int:
        """Return the number of elements: a GPU is waited for once."""
        return int(self.offsets[-1])

    def first(self, is_here: Tensor) -> tuple[Tensor, Tensor]:
        """Runs with a place where `is_here` is true, and the first such place of each, int64.

        >>> [x.tolist() for x in Runs(torch.tensor([0, 2, 4, 5])).first(torch.tensor([0, 1, 0, 0, 1]) > 0)]
        [[0, 2], [1, 4]]
        """
        places = is_here.nonzero().squeeze(1)
        run = torch.searchsorted(self.offsets, places, right=True) - 1
        is_first = torch.ones_like(run, dtype=torch.bool)
        is_first[1:] = run[1:] != run[:-1]
        return run[is_first], places[is_first]

    def total(self, x: Tensor) -> Tensor:
        """Sum of each run, float64 ``[R]``; 0 for an empty run."""
        if not self._on_cpu:
            return torch.segment_reduce(x.double(), "sum", offsets=self.offsets, unsafe=True)
        return torch.from_numpy(self.sums(x.numpy()))

    def sums(self, x: NDArray[Any]) -> NDArray[np.float64]:
        """The same of numpy's values, on the CPU; of numbers in several columns, those of each, ``[R, ...]``."""
        values = x if len(x) == self._end else x[: self._end]
        if values.dtype == bool:
            sums = np.add.reduceat(values.view(np.uint8), self._starts, dtype=self._count).astype(np.float64)
        else:
            # A sum that is infinite or undefined is one: rules look for it, and torch does not warn of it either.
            with np.errstate(over="ignore", invalid="ignore"):
                sums = np.add.reduceat(values, self._starts, dtype=np.float64)
        if self._some_empty:
            filled, sums = sums, np.zeros((len(self), *x.shape[1:]))
            sums[self._filled] = filled
        return sums

    def extremes(self, x: NDArray[Any], of: np.ufunc, empty: float) -> NDArray[np.float64]:
        """Largest or smallest value of each run, float64 ``[R]``, on the CPU; NaN if there is one.

        Args:
            x: the values.
            of: `numpy.maximum` or `numpy.minimum`.
            empty: what an empty run has.
        """
        extremes = np.full(len(self), empty, np.float64)
        if len(self._starts):
            extremes[self._filled] = of.reduceat(x[: self._end], self._starts)
        return extremes

    def some(self, chosen_R: Tensor) -> "Runs":
        """The chosen runs, ``[R]`` bool, one after another."""
        if not self._on_cpu:
            return Runs.of_lengths(self.lengths[chosen_R])
        return Runs.of_sizes(self._sizes[chosen_R.numpy()])

    def at(self, places: NDArray[np.int64]) -> "Runs":
        """Some places in rising order by run, on the CPU: for values that were packed by ``x[places]``.

        >>> Runs(torch.tensor([0, 3, 3, 5])).at(np.array([1, 2, 4])).cuts.tolist()
        [0, 2, 2, 3]
        """
        return Runs(torch.from_numpy(np.searchsorted(places, self.cuts)))

    def count(self, places: Tensor) -> Tensor:
        """Count the places in each run, float64 ``[R]``."""
        run_of = torch.searchsorted(self.offsets, places, right=True) - 1
        return torch.bincount(run_of, minlength=len(self)).double()

    def expand(self, x_R: Tensor) -> Tensor:
        """Repeat the value of each run over its elements: ``[R] -> [offsets[-1]]``."""
        if not self._on_cpu:
            return torch.repeat_interleave(x_R, self.lengths, output_size=self._places)
        return torch.from_numpy(self.spread(x_R.numpy()))

    def spread(self, x_R: NDArray[Any]) -> NDArray[Any]:
        """The same of numpy's values, on the CPU."""
        return x_R.repeat(self._sizes)


def offsets_of(lengths: Tensor) -> Tensor:
    """Offsets of runs of some lengths, ``[R]`` int64, one after another."""
    if lengths.device.type == "cpu":
        return torch.from_numpy(cuts_of(lengths.numpy()))
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def cuts_of(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """The same of lengths that are numpy's, on the CPU.

    >>> cuts_of([2, 0, 1]).tolist()
    [0, 2, 2, 3]
    """
    cuts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=cuts[1:])
    return cuts


def total(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each run, float64 ``[R]``; 0 for an empty run.

    >>> total(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3])).tolist()
    [3.0, 0.0, 4.0]
    """
    return Runs(offsets).total(x)


def trues(x: Tensor, offsets: Tensor) -> Tensor:
    """Count the true values of each run, int64 ``[R]``.

    >>> trues(torch.tensor([True, False, True]), torch.tensor([0, 2, 2, 3])).tolist()
    [1, 0, 1]
    """
    return total(x, offsets).long()


def high(x: Tensor, offsets: Tensor) -> Tensor:
    """Largest value of each run, in the dtype of `x`; NaN if there is one, -inf for an empty run."""
    if x.device.type != "cpu" or len(x) < _FEW:
        return torch.segment_reduce(x, "max", offsets=offsets, unsafe=True)
    return torch.from_numpy(Runs(offsets).extremes(x.numpy(), np.maximum, -np.inf)).to(x.dtype)


def low(x: Tensor, offsets: Tensor) -> Tensor:
    """Smallest value of each run, in the dtype of `x`; NaN if there is one, +inf for an empty run."""
    if x.device.type != "cpu" or len(x) < _FEW:
        return torch.segment_reduce(x, "min", offsets=offsets, unsafe=True)
    return torch.from_numpy(Runs(offsets).extremes(x.numpy(), np.minimum, np.inf)).to(x.dtype)


def expand(x_R: Tensor, offsets: Tensor) -> Tensor:
    """Repeat the value of each run over its elements: ``[R] -> [offsets[-1]]``.

    >>> expand(torch.tensor([5.0, 7.0]), torch.tensor([0, 2, 3])).tolist()
    [5.0, 5.0, 7.0]
    """
    return Runs(offsets).expand(x_R)


def total_by(index: Tensor, x: Tensor, count: int = 0) -> Tensor:
    """Sum of the values at every index, float64, of as many indices as there are, and at least `count`.

    >>> total_by(torch.tensor([1, 0, 1]), torch.tensor([1.0, 2.0, 4.0])).tolist()
    [2.0, 5.0]
    """
    if x.device.type == "cpu":
        return torch.bincount(index, weights=x.double(), minlength=count)
    return _total_by_sorting(index, x, count)


def _total_by_sorting(index: Tensor, x: Tensor, count: int) -> Tensor:
    """Sum by index in a fixed order: on a GPU bincount adds up weights as they come."""
    counts = torch.bincount(index, minlength=count)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Runs(offsets).total(x[torch.argsort(index, stable=True)])


def pick(x: Tensor, chosen: Tensor) -> Tensor:
    """The values at chosen places: those of a mask in their order, or those of indices in the order of these.

    >>> pick(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])).tolist()
    [1.0, 3.0]
    """
    if x.device.type != "cpu":
        return x[chosen]
    return torch.from_numpy(x.numpy()[chosen.numpy()])

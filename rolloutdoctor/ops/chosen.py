"""Some places of a packed tensor, chosen once and picked many times."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.ops.segments import Runs

LEAST_SPAN = 64
"""Chosen places that lie together in spans this long on average are copied span by span."""


class Chosen:
    """Places chosen by a mask: mostly whole rows, or long stretches of them, which are copied as such."""

    def __init__(self, mask: Tensor, runs: Runs | None = None) -> None:
        """Choose the places where a mask is set: ``[T]`` bool, or ``[R]`` bool for all places of some `runs`."""
        self._mask, self._runs = mask, runs
        self._spans: list[slice] | None = None
        if mask.device.type != "cpu":
            return
        is_chosen = mask.numpy()
        bounds = np.concatenate([[0], np.flatnonzero(is_chosen[1:] != is_chosen[:-1]) + 1, [len(is_chosen)]])
        begins, ends = bounds[:-1], bounds[1:]
        if len(is_chosen):
            # Chosen and other stretches take turns.
            begins, ends = begins[int(not is_chosen[0]) :: 2], ends[int(not is_chosen[0]) :: 2]
        places = len(is_chosen)
        if runs is not None:
            cuts = runs.offsets.numpy()
            begins, ends, places = cuts[begins], cuts[ends], int(cuts[-1])
        if len(begins) * LEAST_SPAN <= places:
            self._spans = list(map(slice, begins.tolist(), ends.tolist()))

    @cached_property
    def _places(self) -> Tensor:
        return self._mask if self._runs is None else self._runs.expand(self._mask)

    def pick(self, x: Tensor) -> Tensor:
        """The values at the chosen places, in their order; they may view the memory of `x`.

        >>> Chosen(torch.tensor([True, False, True])).pick(torch.tensor([1.0, 2.0, 3.0])).tolist()
        [1.0, 3.0]
        """
        if x.device.type != "cpu":
            return x[self._places]
        if self._spans is None:
            return torch.from_numpy(x.numpy()[self._places.numpy()])
        if len(self._spans) == 1:
            return x[self._spans[0]]
        values = x.numpy()
        return torch.from_numpy(np.concatenate([values[:0], *(values[span] for span in self._spans)]))

    def fill_(self, x: Tensor, value: float) -> Tensor:
        """Write a value to the chosen places of `x`, and return it."""
        if x.device.type != "cpu":
            x[self._places] = value
            return x
        values = x.numpy()
        if self._spans is None:
            np.copyto(values, value, where=self._places.numpy())
            return x
        for span in self._spans:
            values[span] = value
        return x

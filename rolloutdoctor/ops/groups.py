"""`Groups`: the rows of a step gathered into groups, and sums over them."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg


@dataclass(frozen=True, eq=False)
class Groups:
    """Rows gathered into groups through a permutation, so that token columns never move.

    Attributes:
        index_N: ``[N]`` int64, the group of every row, ``0 <= index < G``.
        order_N: ``[N]`` int64, row indices sorted by group, file order inside a group.
        offsets: ``[G+1]`` int64 offsets into `order_N`; no group is empty.
    """

    index_N: Tensor
    order_N: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, index_N: Tensor, count: int | None = None) -> "Groups":
        """Sort the rows by group. `count` is the number of groups, by default the largest index plus one."""
        if count is None:
            count = int(index_N.max()) + 1 if len(index_N) else 0
        offsets = seg.offsets_of(torch.bincount(index_N, minlength=count))
        return cls(index_N, torch.argsort(index_N, stable=True), offsets)

    @cached_property
    def runs(self) -> seg.Runs:
        """The groups as runs of `order_N`."""
        return seg.Runs(self.offsets)

    @cached_property
    def _in_order(self) -> bool:
        order = self.order_N.cpu().numpy()
        return bool((order[1:] > order[:-1]).all())

    def gathered(self, x_N: Tensor) -> Tensor:
        """The values of the rows, group after group; the same tensor if the rows are in that order."""
        return x_N if self._in_order else seg.pick(x_N, self.order_N)

    @property
    def size_G(self) -> Tensor:
        """``[G]`` int64, rows per group."""
        return self.offsets.diff()

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The distinct numbers of rows that a group has, ascending."""
        return tuple(sorted(set(self.size_G.tolist())))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def total(self, x_N: Tensor) -> Tensor:
        """Return the sum over the rows of each group, float64 ``[G]``."""
        return self.runs.total(self.gathered(x_N))

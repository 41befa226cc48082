"""Statistics of groups over the rows that count in the baseline; the others are left out."""

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg

if TYPE_CHECKING:
    from rolloutdoctor.ops.groups import Groups


class GroupStats:
    """Statistics of each group over its baseline rows, which are counted once.

    Attributes:
        groups: rows gathered into groups.
        in_baseline_N: ``[N]`` bool, rows that count in the baseline.
    """

    def __init__(self, groups: "Groups", in_baseline_N: Tensor) -> None:
        self.groups, self.in_baseline_N = groups, in_baseline_N
        # If every row counts, no row has to be replaced by a filler.
        self._all = (
            bool(in_baseline_N.numpy().all()) if in_baseline_N.device.type == "cpu" else bool(in_baseline_N.all())
        )

    @cached_property
    def count_G(self) -> Tensor:
        """``[G]`` float64, baseline rows of each group."""
        return self.groups.total(self.in_baseline_N)

    @cached_property
    def count_N(self) -> Tensor:
        """``[N]`` float64, baseline rows of the row's group."""
        return self.per_row(self.count_G)

    def per_row(self, x_G: Tensor) -> Tensor:
        """Give every row the value of its group: ``[G] -> [N]``."""
        return seg.pick(x_G, self.groups.index_N)

    def only(self, x_N: Tensor, filler: float = 0.0) -> Tensor:
        """`x_N` for baseline rows and `filler` for the rest."""
        return x_N if self._all else torch.where(self.in_baseline_N, x_N, filler)

    def total(self, x_N: Tensor) -> Tensor:
        """Sum over the baseline rows of each group, float64 ``[G]``."""
        return self.groups.total(self.only(x_N))

    def high(self, x_N: Tensor) -> Tensor:
        """Largest value of the baseline rows of each group, ``[G]``; -inf if there are none, NaN if one is NaN."""
        return seg.high(self.groups.gathered(self.only(x_N, -torch.inf)), self.groups.offsets)

    def low(self, x_N: Tensor) -> Tensor:
        """Smallest value of the baseline rows of each group, ``[G]``; +inf if there are none, NaN if one is NaN."""
        return seg.low(self.groups.gathered(self.only(x_N, torch.inf)), self.groups.offsets)

    def mean(self, x_N: Tensor) -> Tensor:
        """Mean over the baseline rows of each group, float64 ``[G]``; NaN if there are none.

        Computed as the smallest value plus the mean excess over it, so that equal values have exactly that mean; where
        the smallest is not finite it has no excess, and the mean is that of the values.
        """
        low_G = self.low(x_N)
        base_G = torch.where(low_G.isfinite(), low_G, 0.0)
        return base_G + self.total(x_N - self.per_row(base_G)) / self.count_G

    def std(self, x_N: Tensor, mean_G: Tensor | None = None) -> Tensor:
        """Unbiased standard deviation over the baseline rows of each group, float64 ``[G]``; NaN below two.

        Args:
            x_N: the values.
            mean_G: their `mean`, where it is known already.
        """
        centre_G = self.mean(x_N) if mean_G is None else mean_G
        freedom_G = self.count_G - 1
        variance_G = self.total((x_N - self.per_row(centre_G)) ** 2) / freedom_G
        return torch.where(freedom_G > 0, variance_G.sqrt(), torch.nan)

    def spread(self, x_N: Tensor) -> Tensor:
        """Largest minus smallest value among the baseline rows of each group, ``[G]``; NaN if there are none.

        This, and never a standard deviation, says whether rewards are equal: eight times 0.3 has a float32 standard
        deviation above zero.
        """
        return torch.where(self.count_G > 0, self.high(x_N) - self.low(x_N), torch.nan)

"""`Turns`: who wrote which tokens of the responses of a step, given by the run or derived from its mask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.data.schema import AUTHORS
from rolloutdoctor.ops import segments as seg

MODEL = AUTHORS.index("model")
TOOL = AUTHORS.index("tool")
"""Places in `AUTHORS`."""


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of all rows, packed by row and sorted by place within it; K of them. They are on the CPU.

    Attributes:
        offsets: ``[N+1]`` int64, where the turns of each row are.
        start_K: first token of the turn in its row, int64.
        stop_K: the token after its last, int64; that of an empty turn is `start_K`.
        author_K: place of its author in `AUTHORS`, int64.
        number_K: its number in the trajectory as given, int64; -1 where null.
        version_K: version of the policy that sampled it, int64; -1 where null.
        statuses: how it ended, None where null.
        errors: what failed in it, None where null.
        derived_K: its author was not given, but follows from the mask, bool.
    """

    offsets: Tensor
    start_K: Tensor
    stop_K: Tensor
    author_K: Tensor
    number_K: Tensor
    version_K: Tensor
    statuses: Sequence[str | None]
    errors: Sequence[str | None]
    derived_K: Tensor

    def __len__(self) -> int:
        return len(self.start_K)

    @property
    def row_K(self) -> Tensor:
        """Number of the row of each turn, ``[K]`` int64."""
        return torch.arange(len(self.offsets) - 1).repeat_interleave(self.offsets.diff())

    @property
    def place_K(self) -> Tensor:
        """Place of each turn among those of its row, ``[K]`` int64."""
        return torch.arange(len(self)) - self.offsets[:-1][self.row_K]

    def of_rows(self, rows: slice) -> "Turns":
        """Return the turns of some adjacent rows."""
        cuts = self.offsets[rows.start : rows.stop + 1]
        return self.picked(slice(int(cuts[0]), int(cuts[-1])), cuts - cuts[0])

    def among(self, kept_N: Tensor) -> "Turns":
        """Return the turns of some rows, ``[N]`` bool."""
        places_K = kept_N[self.row_K].nonzero().squeeze(1)
        return self.picked(places_K, seg.offsets_of(self.offsets.diff()[kept_N]))

    def picked(self, places: slice | Tensor, offsets: Tensor) -> "Turns":
        """Return some of the turns, of rows with these offsets into them."""

        def some(texts: Sequence[str | None]) -> Sequence[str | None]:
            return texts[places] if isinstance(places, slice) else [texts[place] for place in places.tolist()]

        return Turns(
            offsets,
            self.start_K[places],
            self.stop_K[places],
            self.author_K[places],
            self.number_K[places],
            self.version_K[places],
            some(self.statuses),
            some(self.errors),
            self.derived_K[places],
        )

    def sums(self, x_T: Tensor, rows: Tensor) -> Tensor:
        """Sum values of tokens over each turn, ``[T] -> [K]`` float64.

        Args:
            x_T: values of all tokens of the rows.
            rows: ``[N+1]`` offsets of the rows into them.
        """
        begin_K = rows[:-1][self.row_K] + self.start_K
        # Turn by turn: differences of one running sum over the step would round with its other rows.
        sizes_K = self.stop_K - self.start_K
        offsets = seg.offsets_of(sizes_K)
        places_t = torch.arange(int(offsets[-1])) + (begin_K - offsets[:-1]).repeat_interleave(sizes_K)
        return seg.total(x_T[places_t], offsets)


def joined_turns(turns: Sequence[Turns]) -> Turns:
    """Join the turns of rows that follow each other."""
    sizes = torch.cat([each.offsets.diff() for each in turns])
    return Turns(
        offsets=seg.offsets_of(sizes),
        start_K=torch.cat([each.start_K for each in turns]),
        stop_K=torch.cat([each.stop_K for each in turns]),
        author_K=torch.cat([each.author_K for each in turns]),
        number_K=torch.cat([each.number_K for each in turns]),
        version_K=torch.cat([each.version_K for each in turns]),
        statuses=[text for each in turns for text in each.statuses],
        errors=[text for each in turns for text in each.errors],
        derived_K=torch.cat([each.derived_K for each in turns]),
    )

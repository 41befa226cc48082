"""Blocks: some whole rows of a step with their trained tokens alone, small enough to stay in the cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.chosen import Chosen

BLOCK_TOKENS = 196_608
"""Tokens that are worked on at a time: of more, temporaries leave the cache; of fewer, the calls outweigh the work."""

PART_TOKENS = 98_304
"""Tokens of a block that are evaluated at a time on the CPU: that takes a dozen temporaries beside the step.

Measures of logged values take few, but many calls: they are shown whole blocks.
"""

DEVICE_BLOCK_TOKENS = 2**24
"""Tokens of a block on a GPU, where it must be long enough to keep the device busy."""


def cut(batch: RolloutBatch, tokens: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Cut a step into blocks of whole rows: pairs of row and token slices.

    Args:
        batch: the step.
        tokens: of a block, about; None: as many as suit the device.
    """
    return batch.blocks(tokens or (BLOCK_TOKENS if batch.device.type == "cpu" else DEVICE_BLOCK_TOKENS))


def parts_of(batch: RolloutBatch, rows: slice, tokens: slice, dtype: torch.dtype) -> Iterator["AdjacentRows"]:
    """Cut a block into parts of whole rows and about as many tokens; a GPU takes it as it is."""
    size = tokens.stop - tokens.start
    count = max(1, round(size / PART_TOKENS)) if batch.device.type == "cpu" else 1
    cuts = batch.rows[rows.start : rows.stop + 1].cpu().numpy()
    ends = cuts.searchsorted([tokens.start + size * number // count for number in range(1, count)])
    for start, stop in pairwise(dict.fromkeys([0, *ends.tolist(), len(cuts) - 1])):
        places = slice(int(cuts[start]), int(cuts[stop]))
        yield AdjacentRows(batch, slice(rows.start + start, rows.start + stop), places, dtype)


def whole(batch: RolloutBatch, dtype: torch.dtype) -> "Block":
    """A whole step as one block."""
    return AdjacentRows(batch, slice(0, len(batch)), slice(0, batch.tokens), dtype)


class Block(ABC):
    """Some whole rows, their trained tokens packed: nothing of a masked token is there to leak.

    Attributes:
        rows: where the block's rows are in the step: ``x_N[rows]`` is the block's share of a value per row, ``[n]``.
        first: number of its first row in the step.
        runs: the block's tokens by row.
        tokens: trained tokens in the block.
    """

    def __init__(self, rows: slice | Tensor, first: int, runs: seg.Runs) -> None:
        self.rows, self.first = rows, first
        self.runs, self.tokens = runs, int(runs.offsets[-1])
        self._columns: dict[str, Tensor] = {}
        self._shared: dict[Hashable, tuple[Tensor, ...]] = {}

    def column(self, name: str) -> Tensor:
        """A token column, ``[t]``."""
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

    def cached(self, key: Hashable, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Values per token, ``[t]`` each, that are made once for all objectives.

        Args:
            key: all that decides the values beside the block's columns.
            make: makes them.
        """
        if key not in self._shared:
            self._shared[key] = self._made(key) or make()
        return self._shared[key]

    def _made(self, key: Hashable) -> tuple[Tensor, ...] | None:
        """Such values as far as they are known already."""
        return self._shared.get(key)

    @abstractmethod
    def _column(self, name: str) -> Tensor: ...

    @abstractmethod
    def packed(self, x_T: Tensor) -> Tensor:
        """The block's share of a value per token of the step, ``[T] -> [t]``."""

    @abstractmethod
    def packed_trained(self, x_V: Tensor) -> Tensor:
        """The block's share of a value per trained token of the step, ``[V] -> [t]``."""

    @abstractmethod
    def of_block(self, x_T: Tensor) -> Tensor:
        """Its share of a value per token of the block that it is a part of."""

    @property
    @abstractmethod
    def one_minus_p_squared_T(self) -> Tensor:
        """``(1 - p)^2`` of the sampled tokens, ``[t]`` float64."""

    def per_row(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row, ``[n]`` float64."""
        return self.runs.total(x_T)

    def expand(self, x_N: Tensor) -> Tensor:
        """Give the block's share of a row value to its tokens, ``[N] -> [t]``."""
        return self.runs.expand(x_N[self.rows])

    def of_rows(self, here_n: Tensor) -> "Block | None":
        """The block of some of its rows, ``[n]`` bool; None if there are none."""
        places_n = here_n.nonzero().squeeze(1)
        if len(places_n) == len(here_n):
            return self
        if not len(places_n):
            return None
        rows = self.first + places_n if isinstance(self.rows, slice) else self.rows[places_n]
        return _Part(self, Chosen(here_n, self.runs), rows, self.runs.some(here_n))


class AdjacentRows(Block):
    """Adjacent rows of a step.

    Attributes:
        places: where their tokens are in the step.
    """

    rows: slice

    def __init__(self, batch: RolloutBatch, rows: slice, tokens: slice, dtype: torch.dtype) -> None:
        trained = batch.trained[rows.start : rows.stop + 1]
        super().__init__(rows, rows.start, seg.Runs(trained - trained[0]))
        self._batch, self.places, self._dtype = batch, tokens, dtype
        self._start = int(trained[0])

    @cached_property
    def _chosen(self) -> Chosen | None:
        is_all = self.tokens == self.places.stop - self.places.start
        return None if is_all else Chosen(self._batch.tokens_of("response_mask", self.places))

    def _column(self, name: str) -> Tensor:
        return self._trained(self._batch.tokens_of(name, self.places)).to(self._dtype)

    def packed(self, x_T: Tensor) -> Tensor:
        """See `Block`."""
        return self._trained(x_T[self.places])

    def _trained(self, here_T: Tensor) -> Tensor:
        return here_T if self._chosen is None else self._chosen.pick(here_T)

    def packed_trained(self, x_V: Tensor) -> Tensor:
        """See `Block`."""
        return x_V[self._start : self._start + self.tokens]

    def of_block(self, x_T: Tensor) -> Tensor:
        """See `Block`."""
        return x_T

    @cached_property
    def one_minus_p_squared_T(self) -> Tensor:
        """See `Block`."""
        return self.column("policy_log_probs").expm1().double().square_()


class _Part(Block):
    """Some rows of a block."""

    def __init__(self, block: Block, chosen: Chosen, rows: Tensor, runs: seg.Runs) -> None:
        super().__init__(rows, int(rows[0]), runs)
        self._whole, self._chosen = block, chosen

    def _made(self, key: Hashable) -> tuple[Tensor, ...] | None:
        tensors = self._whole._made(key)
        return None if tensors is None else tuple(map(self._chosen.pick, tensors))

    def _column(self, name: str) -> Tensor:
        return self.of_block(self._whole.column(name))

    def packed(self, x_T: Tensor) -> Tensor:
        return self.of_block(self._whole.packed(x_T))

    def packed_trained(self, x_V: Tensor) -> Tensor:
        return self.of_block(self._whole.packed_trained(x_V))

    def of_block(self, x_T: Tensor) -> Tensor:
        return self._chosen.pick(x_T)

    @cached_property
    def one_minus_p_squared_T(self) -> Tensor:
        return self.of_block(self._whole.one_minus_p_squared_T)


@dataclass(frozen=True, eq=False)
class Scope:
    """Rows that carry a term, ``[N]`` bool."""

    rows_N: Tensor

    @cached_property
    def is_all(self) -> bool:
        """True if every row does."""
        return bool(self.rows_N.all())

    def inside(self, block: Block, x_T: Tensor) -> Tensor:
        """Set `x_T` to 0 at rows outside, and return it: nothing of them enters, NaN included."""
        return x_T if self.is_all else Chosen(~self.rows_N[block.rows], block.runs).fill_(x_T, 0.0)

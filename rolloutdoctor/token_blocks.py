"""Blocks: some whole rows of a step with their trained tokens alone, small enough to stay in the cache."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from rolloutdoctor.batch import RolloutBatch
from rolloutdoctor.ops import segments as seg

BLOCK_TOKENS = 131_072
"""Tokens that are worked on at a time: their temporaries stay in the cache."""


def blocks_of(batch: RolloutBatch, dtype: torch.dtype) -> Iterator["Block"]:
    """Cut a step into blocks."""
    for rows, tokens in batch.blocks(BLOCK_TOKENS):
        yield _block(batch, rows, tokens, dtype)


def whole(batch: RolloutBatch, dtype: torch.dtype) -> "Block":
    """A whole step as one block."""
    return _block(batch, slice(0, len(batch)), slice(0, batch.tokens), dtype)


def _block(batch: RolloutBatch, rows: slice, tokens: slice, dtype: torch.dtype) -> "Block":
    offsets = batch.trained[rows.start : rows.stop + 1] - batch.trained[rows.start]
    trained_T = batch.column("response_mask")[tokens]

    def packed(x_T: Tensor) -> Tensor:
        return x_T[tokens] if int(offsets[-1]) == len(trained_T) else seg.pick(x_T[tokens], trained_T)

    return Block(torch.arange(rows.start, rows.stop, device=batch.device), offsets, dtype, packed, batch)


class Block:
    """Some whole rows, their trained tokens packed: nothing of a masked token is there to leak.

    Attributes:
        rows: ``[n]`` numbers of the rows in the step, ascending.
        offsets: ``[n+1]`` int64 offsets into the block's tokens.
        dtype: of the token values.
    """

    def __init__(
        self, rows: Tensor, offsets: Tensor, dtype: torch.dtype, packed: Callable[[Tensor], Tensor], batch: RolloutBatch
    ) -> None:
        self.rows, self.offsets, self.dtype = rows, offsets, dtype
        self._packed, self._batch = packed, batch
        self._columns: dict[str, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Trained tokens in the block."""
        return int(self.offsets[-1])

    def column(self, name: str) -> Tensor:
        """A token column, ``[t]``."""
        if name not in self._columns:
            self._columns[name] = self.packed(self._batch.column(name)).to(self.dtype)
        return self._columns[name]

    def packed(self, x_T: Tensor) -> Tensor:
        """The block's share of a value per token of the step, ``[T] -> [t]``."""
        return self._packed(x_T)

    def per_row(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row, ``[n]`` float64."""
        return seg.total(x_T, self.offsets)

    def expand(self, x_N: Tensor) -> Tensor:
        """Give the block's share of a row value to its tokens, ``[N] -> [t]``."""
        return seg.expand(x_N[self.rows], self.offsets)

    @cached_property
    def miss_sq_T(self) -> Tensor:
        """``(1 - p)^2`` of the sampled tokens, ``[t]`` float64."""
        return torch.expm1(self.column("policy_log_probs")).double().square_()

    def of_block(self, x_T: Tensor) -> Tensor:
        """Its share of a value per token of the block that it is a part of: here the whole."""
        return x_T

    def packed_trained(self, x_V: Tensor) -> Tensor:
        """The block's share of a value per trained token of the step, ``[V] -> [t]``."""
        start = int(self._batch.trained[self.rows[0]])
        return x_V[start : start + self.tokens]

    def of_rows(self, chosen_N: Tensor) -> "Block | None":
        """The block of some of its rows, given as ``[N]`` bool of the step; None if none of them is here."""
        here_n = chosen_N[self.rows]
        if bool(here_n.all()):
            return self
        if not bool(here_n.any()):
            return None
        chosen_T = seg.expand(here_n, self.offsets)
        lengths = self.offsets.diff()[here_n]
        return _Part(self, chosen_T, self.rows[here_n], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


class _Part(Block):
    """Some rows of a block; its columns are taken from the block's."""

    def __init__(self, whole: Block, chosen_T: Tensor, rows: Tensor, offsets: Tensor) -> None:
        super().__init__(rows, offsets, whole.dtype, lambda x_T: self.of_block(whole.packed(x_T)), whole._batch)
        self._whole, self._chosen_T = whole, chosen_T

    def of_block(self, x_T: Tensor) -> Tensor:
        return seg.pick(x_T, self._chosen_T)

    def packed_trained(self, x_V: Tensor) -> Tensor:
        return self.of_block(self._whole.packed_trained(x_V))

    @cached_property
    def miss_sq_T(self) -> Tensor:
        return self.of_block(self._whole.miss_sq_T)

    def column(self, name: str) -> Tensor:
        if name not in self._columns:
            self._columns[name] = self.of_block(self._whole.column(name))
        return self._columns[name]

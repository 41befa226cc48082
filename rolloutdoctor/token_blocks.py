"""Blocks: some whole rows of a step with their trained tokens alone, small enough to stay in the cache."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
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
        yield _Run(batch, rows, tokens, dtype)


def whole(batch: RolloutBatch, dtype: torch.dtype) -> "Block":
    """A whole step as one block."""
    return _Run(batch, slice(0, len(batch)), slice(0, batch.tokens), dtype)


class Block(ABC):
    """Some whole rows, their trained tokens packed: nothing of a masked token is there to leak.

    Attributes:
        rows: ``[n]`` numbers of the rows in the step, ascending.
        offsets: ``[n+1]`` int64 offsets into the block's tokens.
    """

    def __init__(self, rows: Tensor, offsets: Tensor) -> None:
        self.rows, self.offsets = rows, offsets
        self._columns: dict[str, Tensor] = {}

    @property
    def tokens(self) -> int:
        """Trained tokens in the block."""
        return int(self.offsets[-1])

    def column(self, name: str) -> Tensor:
        """A token column, ``[t]``."""
        if name not in self._columns:
            self._columns[name] = self._column(name)
        return self._columns[name]

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
    def miss_sq_T(self) -> Tensor:
        """``(1 - p)^2`` of the sampled tokens, ``[t]`` float64."""

    def per_row(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row, ``[n]`` float64."""
        return seg.total(x_T, self.offsets)

    def expand(self, x_N: Tensor) -> Tensor:
        """Give the block's share of a row value to its tokens, ``[N] -> [t]``."""
        return seg.expand(x_N[self.rows], self.offsets)

    def of_rows(self, chosen_N: Tensor) -> "Block | None":
        """The block of some of its rows, given as ``[N]`` bool of the step; None if none of them is here."""
        here_n = chosen_N[self.rows]
        if bool(here_n.all()):
            return self
        if not bool(here_n.any()):
            return None
        lengths = self.offsets.diff()[here_n]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return _Part(self, seg.expand(here_n, self.offsets), self.rows[here_n], offsets)


class _Run(Block):
    """Adjacent rows of a step."""

    def __init__(self, batch: RolloutBatch, rows: slice, tokens: slice, dtype: torch.dtype) -> None:
        trained = batch.trained[rows.start : rows.stop + 1]
        super().__init__(torch.arange(rows.start, rows.stop, device=batch.device), trained - trained[0])
        self._batch, self._places, self._dtype = batch, tokens, dtype
        self._start = int(trained[0])
        mask_T = batch.column("response_mask")[tokens]
        self._mask_T = None if self.tokens == len(mask_T) else mask_T

    def _column(self, name: str) -> Tensor:
        return self.packed(self._batch.column(name)).to(self._dtype)

    def packed(self, x_T: Tensor) -> Tensor:
        here_T = x_T[self._places]
        return here_T if self._mask_T is None else seg.pick(here_T, self._mask_T)

    def packed_trained(self, x_V: Tensor) -> Tensor:
        return x_V[self._start : self._start + self.tokens]

    def of_block(self, x_T: Tensor) -> Tensor:
        return x_T

    @cached_property
    def miss_sq_T(self) -> Tensor:
        return torch.expm1(self.column("policy_log_probs")).double().square_()


class _Part(Block):
    """Some rows of a block."""

    def __init__(self, whole: Block, chosen_T: Tensor, rows: Tensor, offsets: Tensor) -> None:
        super().__init__(rows, offsets)
        self._whole, self._chosen_T = whole, chosen_T

    def _column(self, name: str) -> Tensor:
        return self.of_block(self._whole.column(name))

    def packed(self, x_T: Tensor) -> Tensor:
        return self.of_block(self._whole.packed(x_T))

    def packed_trained(self, x_V: Tensor) -> Tensor:
        return self.of_block(self._whole.packed_trained(x_V))

    def of_block(self, x_T: Tensor) -> Tensor:
        return seg.pick(x_T, self._chosen_T)

    @cached_property
    def miss_sq_T(self) -> Tensor:
        return self.of_block(self._whole.miss_sq_T)

"""A step whose columns are moved by what rounding leaves open: what moves with them is open, too."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch

SEED = 20260101
"""Same step, same radii."""


@dataclass(frozen=True, eq=False)
class Source:
    """A column that is moved in several ways.

    Attributes:
        column: its name.
        moved: the step with the column moved, once for each way.
    """

    column: str
    moved: Sequence[RolloutBatch]


def plain(batch: RolloutBatch, dtype: torch.dtype) -> RolloutBatch:
    """The step with columns of its own, and rewards rounded to the dtype that the evaluation holds them in."""

    def rounded(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x if not x.is_floating_point() else x.to(dtype).double() for name, x in columns.items()}

    return replace(
        batch,
        per_token={name: batch.per_token[name] for name in batch.per_token},
        per_row=rounded(batch.per_row),
        rewards=rounded(batch.rewards),
    )


def with_shift(batch: RolloutBatch, column: str, shift_T: Tensor) -> RolloutBatch:
    """The step with a float64 column moved by `shift_T`."""
    moved_T = batch.per_token[column].double() + shift_T
    return replace(batch, per_token={**{name: batch.per_token[name] for name in batch.per_token}, column: moved_T})


def together(batch: RolloutBatch, column: str, shift_T: Tensor) -> Iterator[RolloutBatch]:
    """All tokens up, and all tokens down."""
    for sign in (1.0, -1.0):
        yield with_shift(batch, column, sign * shift_T)


def apart(batch: RolloutBatch, column: str, shift_T: Tensor, *, times: int, by_row: bool) -> Iterator[RolloutBatch]:
    """Some tokens up and the others down, drawn by token or by row, and each draw the other way round, too."""
    for sign in signs(len(batch) if by_row else batch.tokens, times):
        sign_T = sign.repeat_interleave(batch.rows.diff()) if by_row else sign
        yield with_shift(batch, column, sign_T * shift_T)


def signs(count: int, times: int) -> Iterator[Tensor]:
    """Signs that are drawn, and each draw with its signs turned, ``[count]`` float64 each."""
    draw = torch.Generator().manual_seed(SEED)
    for _ in range(times):
        sign = torch.randint(0, 2, (count,), generator=draw).double() * 2 - 1
        yield sign
        yield -sign

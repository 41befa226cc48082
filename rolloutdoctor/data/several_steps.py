"""Several small steps as one batch, so that what an evaluation costs beside its tokens is paid once for all of them."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.data.turns import joined_turns
from rolloutdoctor.ops.groups import Groups

TOGETHER = 393_216
"""Tokens of small steps that are joined, at most."""

SMALL = 2**15
"""Tokens of a step that is joined, at most: with more there is little to gain, and not all are looked at."""

_MOST = 256
"""Steps of one batch, at most."""


def passes(batches: Iterable[RolloutBatch], tokens: int) -> Iterator[list[RolloutBatch]]:
    """Gather adjacent small steps that can be joined; others come alone.

    What is yielded may be cleared: a step lives no longer than whoever takes it lets it.

    Args:
        batches: the steps.
        tokens: of the steps that are gathered, at most.
    """
    waiting: list[RolloutBatch] = []
    held = 0
    for batch in batches:
        fits = batch.tokens <= SMALL and held + batch.tokens <= tokens and len(waiting) < _MOST
        if waiting and not (fits and can_join(waiting[-1], batch)):
            yield waiting
            waiting, held = [], 0
        waiting.append(batch)
        held += batch.tokens
        # No reference may be left in this frame.
        del batch
        if held > min(SMALL, tokens // 2) and len(waiting) == 1:
            yield waiting
            waiting, held = [], 0
    if waiting:
        yield waiting


def can_join(left: RolloutBatch, right: RolloutBatch) -> bool:
    """Return True if two steps have the same split, columns and rewards, so that they can be rows of one batch."""
    if left.split != right.split or left.device != right.device or not len(left) or not len(right):
        return False
    if left.incomplete or right.incomplete or (left.groups is None) != (right.groups is None):
        return False
    texts = ((left.statuses, right.statuses), (left.errors, right.errors))
    if any((len(mine) > 0) != (len(theirs) > 0) for mine, theirs in texts):
        return False
    if (left.turns is None) != (right.turns is None):
        return False
    return _types(left) == _types(right)


def _types(batch: RolloutBatch) -> dict[str, torch.dtype]:
    """Type of every column: of steps that differ, one would come to have another's."""
    dtypes = {name: batch.token_columns.chunks(name)[0].dtype for name in batch.token_columns}
    dtypes |= {name: x_N.dtype for name, x_N in batch.per_row.items()}
    return dtypes | {f"rewards {name}": x_N.dtype for name, x_N in batch.rewards.items()}


def joined(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """Join steps that `can_join`, one after another; `RolloutBatch.place_N` tells their rows apart.

    No group is of two steps, whatever the group identifiers. Names of rows and groups stay with the steps. No token is
    copied: the columns keep the chunks of the steps.
    """
    first = batches[0]
    sizes = torch.tensor([len(each) for each in batches])
    return RolloutBatch(
        step=first.step,
        split=first.split,
        rows=_offsets([each.rows for each in batches]),
        groups=None
        if first.groups is None
        else joined_groups([each.groups for each in batches if each.groups is not None]),
        per_row={name: torch.cat([each.per_row[name] for each in batches]) for name in first.per_row},
        per_token=TokenColumns(
            {
                name: [chunk for each in batches for chunk in each.token_columns.chunks(name)]
                for name in first.token_columns
            }
        ),
        rewards={name: torch.cat([each.rewards[name] for each in batches]) for name in first.rewards},
        statuses=[status for each in batches for status in each.statuses],
        place_N=torch.arange(len(batches)).repeat_interleave(sizes),
        numbers=[each.step for each in batches],
        errors=[error for each in batches for error in each.errors],
        turns=None if first.turns is None else joined_turns([each.turns for each in batches if each.turns is not None]),
    )


def rows_of(batches: Sequence[RolloutBatch]) -> list[slice]:
    """Return where the rows of each step are in the joined batch."""
    spans, start = [], 0
    for each in batches:
        spans.append(slice(start, start + len(each)))
        start += len(each)
    return spans


def _offsets(offsets: Sequence[Tensor]) -> Tensor:
    """Offsets of parts, ``[n + 1]`` each from 0 on, as those of the whole."""
    pieces, start = [offsets[0]], int(offsets[0][-1])
    for each in offsets[1:]:
        pieces.append(each[1:] + start)
        start += int(each[-1])
    return torch.cat(pieces)


def joined_groups(groups: Sequence[Groups]) -> Groups:
    """Join the groups of several steps, one step after another; no group is of two steps."""
    index, order, rows, count = [], [], 0, 0
    for each in groups:
        index.append(each.index_N + count)
        order.append(each.order_N + rows)
        rows, count = rows + len(each.index_N), count + len(each)
    return Groups(torch.cat(index), torch.cat(order), _offsets([each.offsets for each in groups]))

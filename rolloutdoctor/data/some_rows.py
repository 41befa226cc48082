"""A step without some of its rows and tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups


def without(batch: RolloutBatch, rows_N: Tensor, tokens_T: Tensor) -> RolloutBatch:
    """Return a step as if rows had not been sampled, and as if further tokens had been masked.

    Args:
        batch: one step.
        rows_N: ``[N]`` bool, the rows to leave out.
        tokens_T: ``[T]`` bool, tokens that are not trained.
    """
    kept_N, kept_T = ~rows_N, ~seg.expand(rows_N, batch.rows)
    groups, group_ids = batch.groups, batch.group_ids
    if groups is not None:
        left_G, index_N = torch.unique(groups.index_N[kept_N], return_inverse=True)
        groups = Groups.of(index_N, len(left_G))
        group_ids = [group_ids[group] for group in left_G.tolist()] if group_ids else ()
    per_token = {name: batch.column(name)[kept_T] for name in batch.per_token}
    per_token["response_mask"] = batch.column("response_mask")[kept_T] & ~tokens_T[kept_T]
    places = kept_N.nonzero().squeeze(1).tolist()
    return replace(
        batch,
        rows=seg.offsets_of(batch.rows.diff()[kept_N]),
        groups=groups,
        per_row={name: x_N[kept_N] for name, x_N in batch.per_row.items()},
        per_token=per_token,
        rewards={name: x_N[kept_N] for name, x_N in batch.rewards.items()},
        group_ids=group_ids,
        sample_ids=[batch.sample_ids[row] for row in places] if batch.sample_ids else (),
        statuses=[batch.statuses[row] for row in places] if batch.statuses else (),
        errors=[batch.errors[row] for row in places] if batch.errors else (),
        turns=None if batch.turns is None else batch.turns.among(kept_N),
    )


def scattered(x_K: Tensor, kept_N: Tensor, fill: Tensor) -> Tensor:
    """Give values of the rows, or tokens, that were kept back to all of them; the others have those of `fill`."""
    filled = fill.to(x_K.dtype).clone()
    filled[kept_N] = x_K
    return filled


def heaviest(size_N: Tensor, count: int) -> Tensor:
    """Mark the `count` largest positive values, the first of equals, bool like `size_N`.

    >>> heaviest(torch.tensor([1.0, 3.0, 0.0, 3.0]), 2)
    tensor([False,  True, False,  True])
    """
    order = torch.argsort(size_N, descending=True, stable=True)[:count]
    is_heavy_N = torch.zeros_like(size_N, dtype=torch.bool)
    is_heavy_N[order] = size_N[order] > 0
    return is_heavy_N

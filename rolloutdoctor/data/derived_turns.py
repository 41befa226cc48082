"""Turns that a run does not give, read off its mask."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.turns import MODEL, TOOL, Turns, joined_turns
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg

_MASKS = ("response_mask_pre", "response_mask")
"""Columns that tell the model's tokens from others', best first: rejection masks what the model wrote."""


def turns_of_step(batch: RolloutBatch) -> Turns | None:
    """Return who wrote which tokens of a step: as given, and derived for rows of which nothing is given.

    None where nothing is given and no row has a masked run between two trained ones: the run has no turns to speak of.
    """
    turns = batch.turns
    mask = next((name for name in _MASKS if name in batch.per_token), None)
    if mask is None:
        return turns
    lacks_N = torch.ones(len(batch), dtype=torch.bool) if turns is None else turns.offsets.diff() == 0
    if not lacks_N.any():
        return turns
    derived = derived_turns(batch.column(mask).cpu(), batch.rows.cpu())
    if turns is None:
        return derived if (derived.author_K == TOOL).any() else None
    both = joined_turns([turns, derived.among(lacks_N)])
    row_K = torch.cat([turns.row_K, derived.row_K[lacks_N[derived.row_K]]])
    sizes_N = torch.bincount(row_K, minlength=len(batch))
    return both.picked(torch.argsort(row_K, stable=True), seg.offsets_of(sizes_N))


def derived_turns(mask_T: Tensor, rows: Tensor) -> Turns:
    """Read turns off a mask: trained runs are the model's, masked runs between two of these a tool's.

    What is masked before the first and after the last trained token is nobody's; a row without a trained token has no
    turn. A mask of 1 0 1 may as well be one turn of which tokens were dropped: nothing is confirmed of such authors.

    Args:
        mask_T: ``[T]`` bool.
        rows: ``[N+1]`` offsets of the rows into it.

    >>> turns = derived_turns(torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.bool), torch.tensor([0, 6]))
    >>> list(zip(turns.author_K.tolist(), turns.start_K.tolist(), turns.stop_K.tolist()))
    [(0, 1, 3), (1, 3, 4), (0, 4, 5)]
    """
    lengths_N = rows.diff()
    is_start_T = torch.zeros(len(mask_T), dtype=torch.bool)
    is_start_T[1:] = el.is_unequal(mask_T[1:], mask_T[:-1])
    is_start_T[rows[:-1][lengths_N > 0]] = True
    start_R = el.places_of(is_start_T)
    stop_R = torch.cat([start_R[1:], torch.tensor([len(mask_T)])]) if len(start_R) else start_R
    row_R, trained_R = torch.searchsorted(rows, start_R, right=True) - 1, mask_T[start_R]
    is_inner_R = torch.zeros(len(start_R), dtype=torch.bool)
    is_inner_R[1:-1] = (row_R[:-2] == row_R[1:-1]) & (row_R[2:] == row_R[1:-1])
    kept_R = trained_R | is_inner_R
    row_K = row_R[kept_R]
    unknown_K = torch.full_like(row_K, -1)
    texts: list[str | None] = [None] * len(row_K)
    return Turns(
        offsets=seg.offsets_of(torch.bincount(row_K, minlength=len(lengths_N))),
        start_K=start_R[kept_R] - rows[row_K],
        stop_K=stop_R[kept_R] - rows[row_K],
        author_K=torch.where(trained_R[kept_R], MODEL, TOOL),
        number_K=unknown_K,
        version_K=unknown_K,
        statuses=texts,
        errors=texts,
        derived_K=torch.ones(len(row_K), dtype=torch.bool),
    )

"""Beginnings that the turns of tools have in common, and where they stand within turns of the model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.data.turns import MODEL, TOOL, Turns
from rolloutdoctor.ops import segments as seg


@dataclass(frozen=True, eq=False)
class Header:
    """The first ids of most turns of tools of a step.

    Attributes:
        ids: of its tokens.
        starts_K: turns that begin with it, ``[K]`` bool.
    """

    ids: tuple[int, ...]
    starts_K: Tensor


def header_of(
    turns: Turns, ids_T: Tensor, rows: Tensor, *, least: int, most: int, share: float, kept: float
) -> Header | None:
    """Return the beginning that most turns of tools have; None if there is none.

    It is as long as nearly as many turns have it: behind a header their contents differ.

    Args:
        turns: of a step.
        ids_T: ``[T]`` ids of its tokens.
        rows: ``[N+1]`` offsets of its rows.
        least: tokens of a header, at least: fewer may be a line break.
        most: tokens of a header, at most.
        share: of the turns of tools that begin with its first `least` tokens, at least.
        kept: of these, the share that has to share each further token.
    """
    begin_K = rows[:-1][turns.row_K] + turns.start_K
    size_K = turns.stop_K - turns.start_K
    is_tool_K = (turns.author_K == TOOL) & (size_K > 0)
    long_K = is_tool_K & (size_K >= least)
    if not long_K.any():
        return None
    starts_K = long_K
    token_ids: list[int] = []
    for place in range(most):
        here_K = starts_K & (size_K > place)
        if not here_K.any():
            break
        ids, counts = torch.unique(ids_T[begin_K[here_K] + place], return_counts=True)
        top = int(counts.argmax())
        # The first tokens are those of most turns; the next ones those of nearly all of these.
        enough = share * int(is_tool_K.sum()) if place < least else kept * int(starts_K.sum())
        if int(counts[top]) < enough:
            break
        token_ids.append(int(ids[top]))
        places_K = torch.where(here_K, begin_K + place, 0)
        starts_K = here_K & (ids_T[places_K] == token_ids[-1])
    return Header(tuple(token_ids), starts_K) if len(token_ids) >= least else None


def inside_model(header: Header, turns: Turns, ids_T: Tensor, trained_T: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Count the headers within turns of the model, all of them trained, that the model goes on after.

    A turn that ends with a header stopped at it: a stop string does that, and the environment's turn follows.

    Returns:
        How many each turn has, and trained tokens from the first of them to its end, ``[K]`` float64 each.
    """
    length = len(header.ids)
    none_K = torch.zeros(len(turns), dtype=torch.float64)
    if len(ids_T) <= length:
        return none_K, none_K
    matches_T = torch.ones(len(ids_T) - length, dtype=torch.bool)
    for place, token_id in enumerate(header.ids):
        stop = len(ids_T) - length + place
        matches_T &= (ids_T[place:stop] == token_id) & trained_T[place:stop]
    turn_T = torch.full((len(ids_T),), -1)
    size_K = turns.stop_K - turns.start_K
    offsets = seg.offsets_of(size_K)
    begin_K = rows[:-1][turns.row_K] + turns.start_K
    places_t = torch.arange(int(offsets[-1])) + (begin_K - offsets[:-1]).repeat_interleave(size_K)
    turn_T[places_t] = torch.arange(len(turns)).repeat_interleave(size_K)
    # The token behind it is the model's, too.
    matches_T &= (turn_T[:-length] == turn_T[length:]) & (turn_T[:-length] >= 0)
    at_M = matches_T.nonzero().squeeze(1)
    at_M = at_M[turns.author_K[turn_T[at_M]] == MODEL]
    count_K = torch.bincount(turn_T[at_M], minlength=len(turns)).double()
    first_K = torch.full((len(turns),), len(ids_T)).scatter_reduce(0, turn_T[at_M], at_M, "amin")
    is_after_T = torch.zeros(len(ids_T), dtype=torch.bool)
    is_after_T[places_t] = places_t >= first_K.repeat_interleave(size_K)
    return count_K, turns.sums(is_after_T & trained_T, rows)

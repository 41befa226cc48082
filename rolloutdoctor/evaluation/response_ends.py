"""Ends of responses, token by token; shared by the rules about masks, end-of-sequence tokens and truncation."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import cut
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.segments import Runs, total

STOPPED = frozenset({"stop", "eos", "completed", "finished"})
"""Finish reasons of a response that the model ended itself, or a stop string."""

NONE = -1
"""In place of a token id where there is no token."""


def response_ends(block: TokenBlock) -> Mapping[str, Tensor]:
    """Return what each row ends with, ``[n]`` each.

    Returns:
        `last` and `last_trained`: ids of the last token and of the last trained one; `ends_trained`: the last token is
        trained; `trained`: number of trained tokens; `gap`: 1 if masked tokens lie between trained ones.
    """
    return block.cached("response ends", lambda: _response_ends(block))


def _response_ends(block: TokenBlock) -> dict[str, Tensor]:
    ids_T, offsets = block.column("response_ids"), block.runs.offsets
    is_filled_n = block.runs.lengths > 0
    last_n = torch.full_like(offsets[1:], NONE)
    last_n[is_filled_n] = ids_T[offsets[1:][is_filled_n] - 1].long()
    trained_n = block.trained_n.long()
    is_whole_n = trained_n == block.runs.lengths
    if bool((is_whole_n | (trained_n == 0)).all()):
        # No row is masked in part, as in most blocks of responses of one turn.
        has_n = trained_n > 0
        return {
            "last": last_n,
            "last_trained": torch.where(has_n, last_n, NONE),
            "ends_trained": has_n,
            "trained": trained_n,
            "gap": has_n & ~is_whole_n,
        }
    places = block.trained_T.nonzero().squeeze(1)
    # Trained tokens before the start and before the end of each row.
    before_n = torch.searchsorted(places, offsets)
    first_n, past_n = before_n[:-1], before_n[1:]
    trained_n = past_n - first_n
    none_n = torch.full_like(trained_n, NONE)
    has_n = trained_n > 0
    first_place_n, last_place_n, last_trained_n = none_n.clone(), none_n.clone(), none_n.clone()
    last_place_n[has_n] = places[past_n[has_n] - 1]
    first_place_n[has_n] = places[first_n[has_n]]
    last_trained_n[has_n] = ids_T[last_place_n[has_n]].long()
    return {
        "last": last_n,
        "last_trained": last_trained_n,
        "ends_trained": has_n & (last_place_n == offsets[1:] - 1),
        "trained": trained_n,
        "gap": has_n & (last_place_n - first_place_n + 1 > trained_n),
    }


def has_status(statuses: Sequence[str | None], words: Collection[str] | None, device: torch.device) -> Tensor:
    """Rows whose finish reason is one of some words, or is any word where these are None, ``[N]`` bool."""
    is_one = {status: bool(status) and (words is None or str(status).lower() in words) for status in set(statuses)}
    return torch.from_numpy(np.fromiter(map(is_one.__getitem__, statuses), bool, len(statuses))).to(device)


def common_end(last_N: Tensor, stopped_N: Tensor, by_step: ByStep, share: float, fewest: int) -> Tensor:
    """The token id that ends the stopped responses of each row's step, where one of them ends nearly all; else `NONE`.

    Args:
        last_N: id of the last token of each row.
        stopped_N: rows that were stopped.
        by_step: the rows by step.
        share: of the stopped rows that it has to end, at least; more than half.
        fewest: rows that it takes.

    Returns:
        ``[N]`` int64.

    >>> last_N = torch.tensor([2, 7, 2, 2, 5, 6])
    >>> common_end(last_N, last_N > 0, ByStep.of_sizes([4, 2]), 0.75, 2).tolist()
    [2, 2, 2, 2, -1, -1]
    """
    found_N = stopped_N & (last_N != NONE)
    last, rows = last_N[found_N].cpu().numpy(), ByStep.of_sizes(by_step.count(found_N))
    ordered = last[np.lexsort((last, rows.step_N.numpy()))]
    # An id that ends more than half of the rows is the one in the middle.
    end = np.append(ordered, NONE)[rows.runs.cuts[:-1] + rows.size // 2]
    ends = rows.count(last == end.repeat(rows.size))
    return by_step.expand(np.where((rows.size >= fewest) & (ends >= share * rows.size), end, NONE))


def trained_after(batch: RolloutBatch, token_N: Tensor) -> Tensor:
    """Count the trained tokens of each row after the first trained occurrence of its token, ``[N]`` float64.

    A masked one is the end of an earlier turn, whoever's.
    """
    found_N = torch.zeros(len(batch), dtype=torch.float64, device=batch.device)
    for rows, tokens in cut(batch):
        offsets, ids_T = batch.rows[rows.start : rows.stop + 1] - tokens.start, batch.tokens_of("response_ids", tokens)
        mask_T = batch.tokens_of("response_mask", tokens)
        places = (mask_T & (ids_T == Runs(offsets).expand(token_N[rows].to(ids_T.dtype)))).nonzero().squeeze(1)
        # What follows the first occurrence from the start of a row on, if that is in the row.
        after_n = torch.cat([places + 1, offsets[-1:]])[torch.searchsorted(places, offsets[:-1])].minimum(offsets[1:])
        edges = torch.cat([torch.stack([offsets[:-1], after_n], 1).flatten(), offsets[-1:]])
        found_N[rows] = total(mask_T, edges)[1::2]
    return found_N

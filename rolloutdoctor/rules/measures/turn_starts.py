"""Gap between sampler and trainer where a turn begins, against the rest of the same responses."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import cut
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops import segments as seg

STRATA = (-0.01, -0.1, -0.5, -2.0)
"""Log-probs between which tokens are compared: rounding moves unlikely tokens more."""

LOWEST, BINS, DROPPED = 4 * (127 - 20), 120, 21
"""Bins of a distance: four equal ones for each doubling, from 2**-20 on, the first of which holds 0 as well. They are
the exponent of a float32 and the first two bits of its fraction; the other bits are dropped."""

FIRST_TOKENS = 4
"""Tokens of a turn that count as its start."""


def turn_starts(block: TokenBlock) -> Tensor:
    """Return the first trained tokens behind masked ones, where others of the row come before, ``[t]`` bool."""
    trained_T = block.trained_T
    start_T = trained_T.clone()
    start_T[1:] &= ~trained_T[:-1]
    # What a row begins with is no second turn, masked or not.
    offsets = block.runs.offsets
    start_T[offsets[:-1][block.runs.lengths > 0]] = False
    if not bool(start_T.any()):
        return start_T
    before_T = trained_T.long().cumsum(0) - trained_T.long()
    first_n = torch.cat([before_T, before_T.new_zeros(1)])[offsets[:-1]]
    return start_T & (before_T > block.runs.expand(first_n))


def distances(batch: RolloutBatch, rows_N: Tensor) -> tuple[dict[str, float], dict[str, float]]:
    """Count the distances of old from rollout log-probs, near the start of turns and elsewhere, by stratum and bin.

    Args:
        batch: the step.
        rows_N: ``[N]`` bool, rows with several turns; the others are left out.

    Returns:
        ``STRATUM:BIN`` to the number of tokens, at starts and elsewhere.
    """
    size = (len(STRATA) + 1) * BINS
    counts = torch.zeros(2 * size, dtype=torch.int64, device=batch.device)
    for rows, tokens in cut(batch):
        if not bool(rows_N[rows].any()):
            continue
        block = TokenBlock(batch, rows, tokens)
        old_T = block.column("old_log_probs").float()
        distance_T = (old_T - block.column("rollout_log_probs").float()).abs()
        told_T = block.trained_T & distance_T.isfinite() & block.runs.expand(rows_N[rows])
        near_T = turn_starts(block)
        last_T, first_n = near_T, block.runs.offsets[:-1][block.runs.lengths > 0]
        for _ in range(FIRST_TOKENS - 1):
            next_T = torch.zeros_like(near_T)
            next_T[1:] = last_T[:-1] & block.trained_T[1:]
            next_T[first_n] = False
            near_T, last_T = near_T | next_T, next_T
        key_T = ((distance_T.view(torch.int32) >> DROPPED) - LOWEST).clamp_(0, BINS - 1)
        for edge in STRATA:
            key_T += (old_T <= edge) * BINS
        key_T += near_T * size
        counts += torch.bincount(seg.pick(key_T, told_T), minlength=2 * size)
    return _named(counts[size:]), _named(counts[:size])


def _named(counts: Tensor) -> dict[str, float]:
    return {f"{place // BINS}:{place % BINS}": float(counts[place]) for place in counts.nonzero().squeeze(1).tolist()}

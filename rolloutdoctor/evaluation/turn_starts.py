"""How far sampler and trainer are apart where a turn begins, against the rest of the same responses."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.blocks import cut
from rolloutdoctor.evaluation.token_measures import TokenBlock

STRATA = (-0.01, -0.1, -0.5, -2.0)
"""Log-probs between which tokens are compared: rounding moves unlikely tokens more."""

PER_OCTAVE, LOWEST, BINS = 4, -80, 120
"""Bins of a distance: four for each doubling, from 2**-20 on; the first one holds 0 as well."""

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
    near = torch.zeros((len(STRATA) + 1) * BINS, dtype=torch.int64, device=batch.device)
    rest = torch.zeros_like(near)
    for rows, tokens in cut(batch):
        if not bool(rows_N[rows].any()):
            continue
        block = TokenBlock(batch, rows, tokens)
        distance_T = block.log_ratio("old_log_probs", "rollout_log_probs").abs()
        told_T = block.trained_T & distance_T.isfinite() & block.runs.expand(rows_N[rows])
        near_T = turn_starts(block)
        last_T = near_T
        for _ in range(FIRST_TOKENS - 1):
            next_T = torch.zeros_like(near_T)
            next_T[1:] = last_T[:-1] & block.trained_T[1:] & (block.position_T[1:] > 0)
            near_T, last_T = near_T | next_T, next_T
        bins_T = (distance_T.clamp(min=2.0 ** (LOWEST / PER_OCTAVE)).log2() * PER_OCTAVE).floor() - LOWEST
        bins_T = bins_T.nan_to_num(0.0).clamp(0, BINS - 1).long()
        edges = torch.tensor(STRATA[::-1], dtype=torch.float64, device=batch.device)
        key_T = torch.bucketize(block.column("old_log_probs").double(), edges) * BINS + bins_T
        near += torch.bincount(key_T[told_T & near_T], minlength=len(near))
        rest += torch.bincount(key_T[told_T & ~near_T], minlength=len(rest))
    return _named(near), _named(rest)


def _named(counts: Tensor) -> dict[str, float]:
    return {f"{place // BINS}:{place % BINS}": float(counts[place]) for place in counts.nonzero().squeeze(1).tolist()}

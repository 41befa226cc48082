"""16-grams of a response that occurred in it before."""

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import scramble
from rolloutdoctor.ops.repeats import repeated_ngrams


def repeated_tokens(block: TokenBlock, least: int, sampled: int) -> list[Tensor]:
    """Count the 16-grams of trained tokens, and those that occurred before, of sampled responses, ``[n]`` float64 each.

    Args:
        block: the rows.
        least: tokens that a response is longer than.
        sampled: tokens of a step beyond which only some of its responses are looked at, chosen by hash.
    """
    batch = block.batch
    counts = [torch.zeros(len(block.runs), dtype=torch.float64, device=batch.device) for _ in range(2)]
    every_S = -(-batch.rows[batch.by_step.runs.offsets].diff() // sampled)
    every_n = batch.by_step.expand(every_S.clamp(min=1))[block.rows]
    long_n = (block.runs.lengths > least) & (scramble(batch.row_N[block.rows]) % every_n == 0)
    if bool(long_n.any()):
        here_T = block.runs.expand(long_n)
        ids_T, told_T = block.column("response_ids")[here_T], block.trained_T[here_T]
        for own_n, count_n in zip(counts, repeated_ngrams(ids_T, told_T, block.runs.some(long_n)), strict=True):
            own_n[long_n] = count_n
    return counts

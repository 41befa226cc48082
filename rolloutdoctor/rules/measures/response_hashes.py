"""Hashes of responses and of their prefixes, and how likely these were."""

from math import isfinite

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import LENGTHS, PrefixHashes, scramble
from rolloutdoctor.ops.segments import Runs


def response_hashes(block: TokenBlock, name: str | None, followed: int) -> dict[str, Tensor]:
    """Return hashes and nats of each row's response and of its prefixes, ``[n]`` each.

    Args:
        block: its rows.
        name: column of the log-probs, or None.
        followed: tokens of the prefix that is compared across steps.

    Returns:
        `response`, a hash of the ids, else of the text; with ids `prefix_LENGTH`, of the first tokens, `seed`, of the
        prompt, and `key` and `prefix_key`, of the response and of the followed prefix after it: without ids these are
        0. With log-probs `log_prob` of the trained tokens, `told`, how many these are, and with ids `nats_LENGTH`.
    """
    has_ids = block.is_logged("response_ids")
    if has_ids:
        hash_nK, seed_n = block.prefixes.at_lengths_NK, block.prefixes.seed_N
        response_n = hash_nK[:, -1]
    else:
        response_n = block.row_column("response")
        hash_nK, seed_n = response_n.new_zeros(len(response_n), len(LENGTHS)), torch.zeros_like(response_n)
    names = [f"prefix_{length}" for length in LENGTHS]
    hashes = {"response": response_n, "seed": seed_n, **dict(zip(names, hash_nK.unbind(1), strict=False))}
    for key, hash_n in (("key", response_n), ("prefix_key", hashes[f"prefix_{followed}"])):
        hashes[key] = scramble(hash_n + seed_n) if has_ids else seed_n
    if name is None:
        return hashes
    value_T, told_n = block.column(name), block.trained_n
    is_finite = all(map(isfinite, block.extremes(name)))
    is_whole_n = told_n == block.runs.lengths
    if not is_finite or not bool((is_whole_n | (told_n == 0)).all()):
        told_T = block.trained_T if is_finite else block.trained_T & value_T.isfinite()
        value_T, told_n = torch.where(told_T, value_T, 0.0), block.row_sum(told_T)
    each_nK = parts_of(block).total(value_T).reshape(-1, len(LENGTHS) + 1)
    # Rows that are not trained are left out, whatever they hold.
    *nats_K, log_prob_n = running_sums(torch.where((told_n > 0)[:, None], each_nK, 0.0)).unbind(1)
    hashes |= {"log_prob": log_prob_n, "told": told_n}
    if has_ids:
        hashes |= {f"nats_{length}": -nats_n for length, nats_n in zip(LENGTHS, nats_K, strict=True)}
    return hashes


def parts_of(block: TokenBlock) -> Runs:
    """The tokens of each row, cut at `LENGTHS`."""
    if block.is_logged("response_ids"):
        return block.prefixes.parts
    return PrefixHashes.of(torch.zeros(0, dtype=torch.int64), block.runs).parts


def running_sums(x_NK: Tensor) -> Tensor:
    """Sum of each row up to and with a column, ``[N, K]``; on a GPU column by column, always in the same order."""
    if x_NK.device.type == "cpu":
        return x_NK.cumsum(1)
    columns = list(x_NK.unbind(1))
    for place in range(1, len(columns)):
        columns[place] = columns[place - 1] + columns[place]
    return torch.stack(columns, 1)

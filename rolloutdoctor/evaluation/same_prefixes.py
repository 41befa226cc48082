"""Prefixes that several responses of one prompt share, though independent draws would not."""

from collections.abc import Mapping
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import LENGTHS, PrefixHashes, scramble
from rolloutdoctor.ops.segments import Runs

BEYOND = 50
"""Nats of a prefix from which on no two responses share it by chance: of 10^8 pairs, at seven lengths, 1e-13."""

FOLLOWED = LENGTHS.index(128)
"""The length that is compared across steps."""


def response_sums(block: TokenBlock, name: str | None) -> dict[str, Tensor]:
    """Return hashes and nats of each row's prefixes and of its whole response.

    Args:
        block: its rows.
        name: column of the log-probs, or None.

    Returns:
        As far as there are columns: `prefix`, ``[n, K]`` int64, hash of the first `LENGTHS` tokens, `hash` of all and
        `after_prompt` with the prompt, ``[n]``; `prefix_nats`, ``[n, K]`` float64, and `log_prob`, ``[n]``, of the
        trained tokens, and `told`, ``[n]``, how many these are.
    """
    found: dict[str, Tensor] = {}
    if block.is_logged("response_ids"):
        hash_NK = block.prefixes.at_lengths_NK
        found |= {"prefix": hash_NK[:, :-1], "hash": hash_NK[:, -1]}
        found["after_prompt"] = found["hash"] + block.prefixes.seed_N
    if name is None:
        return found
    value_T, told_n = block.column(name), block.trained_n
    is_finite = all(map(isfinite, block.extremes(name)))
    is_whole_n = told_n == block.runs.lengths
    if not is_finite or not bool((is_whole_n | (told_n == 0)).all()):
        told_T = block.trained_T if is_finite else block.trained_T & value_T.isfinite()
        value_T, told_n = torch.where(told_T, value_T, 0.0), block.row_sum(told_T)
    each_NK = parts_of(block).total(value_T).reshape(-1, len(LENGTHS) + 1)
    # Of rows that are not trained nothing is told, whatever they hold.
    sums_NK = running_sums(torch.where((told_n > 0)[:, None], each_NK, 0.0))
    return found | {"prefix_nats": -sums_NK[:, :-1], "log_prob": sums_NK[:, -1], "told": told_n}


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


class SharedPrefixes(NamedTuple):
    """Rows of a step that share an unlikely prefix with a different response of their prompt.

    Attributes:
        rows: rows beyond the first of each prefix, in groups.
        across: the same in other groups of the same prompt.
        groups: groups with such rows.
        longest: tokens of the longest such prefix.
        nats_N: nats of the longest one of each row, ``[N]`` float64; 0 for other rows.
    """

    rows: int
    across: int
    groups: int
    longest: int
    nats_N: Tensor


def shared_prefixes(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> SharedPrefixes | None:
    """Compare the prefixes of a step; None without ids, log-probs or groups.

    A prefix that groups of different prompts share was forced, and is no copy.

    Args:
        batch: the step.
        measured: ``prefix`` and ``prefix_nats``, ``[N, K]``: hash of each prefix and the nats of its trained tokens;
            ``hash`` and ``after_prompt``, of the whole response alone and after its prompt, ``[N]``.
    """
    if "prefix" not in measured or "prefix_nats" not in measured or batch.groups is None or not len(batch):
        return None
    group_N, length_N = batch.groups.index_N.cpu(), batch.rows.diff().cpu()
    response_N = measured["hash"].cpu()
    seed_N = measured["after_prompt"].cpu() - response_N
    found_N = torch.zeros(len(batch), dtype=torch.float64)
    first_n = measured["prefix"][:, 0].cpu()[length_N > LENGTHS[0]]
    if len(torch.unique(first_n)) == len(first_n):
        # Rows that share a prefix share its beginning: mostly there are none.
        return SharedPrefixes(0, 0, 0, 0, found_N)
    # The shortest unlikely prefix that a row shares says with whom: longer ones gather fewer rows.
    kind_N, longest = torch.full((len(batch),), -1), 0
    for place in reversed(range(len(LENGTHS))):
        nats_N = measured["prefix_nats"][:, place].cpu()
        rows = ((length_N > LENGTHS[place]) & (nats_N >= BEYOND)).nonzero().squeeze(1)
        prefix_n = measured["prefix"][rows, place].cpu()
        if len(torch.unique(prefix_n)) == len(rows):
            continue
        alone_n, prompt_n, response_n = (
            torch.unique(each, return_inverse=True)[1] for each in (prefix_n, seed_N[rows], response_N[rows])
        )
        kind_n = torch.unique(alone_n * len(rows) + prompt_n, return_inverse=True)[1]
        is_forced_n = _different(alone_n, prompt_n)[alone_n] > 1
        is_shared_n = (_different(kind_n, response_n)[kind_n] > 1) & ~is_forced_n
        some = rows[is_shared_n]
        if len(some):
            longest = max(longest, LENGTHS[place])
            found_N[some] = found_N[some].maximum(nats_N[some])
            kind_N[some] = kind_n[is_shared_n] + place * len(batch)
    shared = (kind_N >= 0).nonzero().squeeze(1)
    if not len(shared):
        return SharedPrefixes(0, 0, 0, 0, found_N)
    kind_n, group_n = kind_N[shared], group_N[shared]
    # A response that is there several times is a copy, and counts once.
    each = torch.unique(torch.stack([kind_n, group_n, response_N[shared]]), dim=1)
    in_groups, counts = torch.unique(each[:2], dim=1, return_counts=True)
    return SharedPrefixes(
        rows=int((counts - 1).sum()),
        across=in_groups.shape[1] - len(torch.unique(in_groups[0])),
        groups=len(torch.unique(in_groups[1][counts > 1])),
        longest=longest,
        nats_N=found_N,
    )


def _different(key_n: Tensor, value_n: Tensor) -> Tensor:
    """Different values at each key, ``[K]``; both are counted from 0."""
    pairs = torch.unique(key_n * (int(value_n.max()) + 1) + value_n)
    return torch.bincount(pairs // (int(value_n.max()) + 1), minlength=int(key_n.max()) + 1)


def kept_prefixes(batch: RolloutBatch, measured: Mapping[str, Tensor], keys: int) -> dict[str, float]:
    """Return the unlikely prefixes of a step with the smallest hashes, each with its log-prob, by hash and step."""
    if "prefix" not in measured or "prefix_nats" not in measured or batch.prompts is None:
        return {}
    nats_N = measured["prefix_nats"][:, FOLLOWED]
    known_N = (batch.prompts != 0) & (batch.rows.diff() > LENGTHS[FOLLOWED]) & (nats_N >= BEYOND)
    seed_N = measured["after_prompt"] - measured["hash"]
    key_K, kind_n = torch.unique(scramble(measured["prefix"][:, FOLLOWED] + seed_N)[known_N], return_inverse=True)
    value_K = torch.full((len(key_K),), -torch.inf, dtype=torch.float64, device=batch.device)
    value_K = value_K.scatter_reduce(0, kind_n, -nats_N[known_N], "amax")
    pairs = zip(key_K[:keys].tolist(), value_K[:keys].tolist(), strict=True)
    return {f"{key + 2**63:016x}:{batch.step}": value for key, value in pairs}

"""Prefixes that several responses of one prompt share, though independent draws would not."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.kept_keys import kept_keys
from rolloutdoctor.ops.numbered import numbered
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
    """Rows that share an unlikely prefix with a different response of their prompt, in one step or several.

    Attributes:
        counts: name of a field of `duplicate_responses.DuplicateTally` to its value in each step, ``[S]``; empty where
            there are no such rows.
        nats_N: nats of the longest such prefix of each row, ``[N]`` float64, on the CPU; 0 for other rows.
    """

    counts: Mapping[str, NDArray[Any]]
    nats_N: Tensor


def shared_prefixes(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> SharedPrefixes | None:
    """Compare the prefixes of each step; None without ids, log-probs or groups.

    A prefix that groups of different prompts share was forced, and is no copy.

    Args:
        batch: the steps.
        measured: ``prefix`` and ``prefix_nats``, ``[N, K]``: hash of each prefix and the nats of its trained tokens;
            ``hash`` and ``after_prompt``, of the whole response alone and after its prompt, ``[N]``.
    """
    if "prefix" not in measured or "prefix_nats" not in measured or batch.groups is None or not len(batch):
        return None
    rows = batch.by_step.cpu
    group_N, length_N, step_N = batch.groups.index_N.cpu(), batch.rows.diff().cpu(), rows.step_N
    response_N = measured["hash"].cpu()
    seed_N = measured["after_prompt"].cpu() - response_N
    found_N, longest_N = torch.zeros(len(batch), dtype=torch.float64), torch.zeros(len(batch))
    is_long_N = length_N > LENGTHS[0]
    if _are_different(numbered(step_N[is_long_N], measured["prefix"][:, 0].cpu()[is_long_N])):
        # Rows that share a prefix share its beginning: mostly there are none.
        return SharedPrefixes({}, found_N)
    # The shortest unlikely prefix that a row shares says with whom: longer ones gather fewer rows.
    kind_N = torch.full((len(batch),), -1)
    for place in reversed(range(len(LENGTHS))):
        nats_N = measured["prefix_nats"][:, place].cpu()
        here = ((length_N > LENGTHS[place]) & (nats_N >= BEYOND)).nonzero().squeeze(1)
        alone_n = numbered(step_N[here], measured["prefix"][:, place].cpu()[here])
        if _are_different(alone_n):
            continue
        kind_n = numbered(alone_n, seed_N[here])
        is_forced_n = _different(alone_n, kind_n) > 1
        is_shared_n = (_different(kind_n, response_N[here]) > 1) & ~is_forced_n
        some = here[is_shared_n]
        longest_N[some] = longest_N[some].clamp(min=LENGTHS[place])
        found_N[some] = found_N[some].maximum(nats_N[some])
        kind_N[some] = kind_n[is_shared_n] + place * len(batch)
    shared = (kind_N >= 0).nonzero().squeeze(1)
    if not len(shared):
        return SharedPrefixes({}, found_N)
    # A response that is there several times is a copy, and counts once.
    each = torch.unique(torch.stack([kind_N[shared], group_N[shared], response_N[shared]]), dim=1)
    (kind_P, group_P), size_P = torch.unique(each[:2], dim=1, return_counts=True)
    is_again_P = torch.cat([torch.zeros(1), kind_P.diff() == 0])
    step_G = torch.zeros(len(batch.groups), dtype=torch.int64).index_copy_(0, group_N, step_N)

    def count(group_n: Tensor, times_n: Tensor | None = None) -> NDArray[Any]:
        return torch.bincount(step_G[group_n], times_n, len(rows)).long().numpy()

    counts = {
        "prefixed": count(group_P, size_P - 1),
        "prefixed_across": count(group_P, is_again_P),
        "prefixed_groups": count(torch.unique(group_P[size_P > 1])),
        "longest": rows.high(longest_N),
    }
    return SharedPrefixes(counts, found_N)


def _are_different(number_n: Tensor) -> bool:
    """True if no two numbers, counted from 0, are the same."""
    return not len(number_n) or int(number_n.max()) == len(number_n) - 1


def _different(key_n: Tensor, value_n: Tensor) -> Tensor:
    """How many different values the rows with each row's key have, ``[n]``; keys are counted from 0."""
    pair_n = numbered(key_n, value_n)
    key_P = torch.zeros(len(key_n), dtype=torch.int64).index_copy_(0, pair_n, key_n)[: int(pair_n.max()) + 1]
    return torch.bincount(key_P)[key_n]


def kept_prefixes(batch: RolloutBatch, measured: Mapping[str, Tensor], keys: int) -> list[dict[str, float]]:
    """Return the unlikely prefixes of each step with the smallest hashes, each with its log-prob, by hash and step."""
    if "prefix" not in measured or "prefix_nats" not in measured or batch.prompts is None:
        return [{} for _ in batch.step_numbers]
    nats_N = measured["prefix_nats"][:, FOLLOWED]
    known_N = (batch.prompts != 0) & (batch.rows.diff() > LENGTHS[FOLLOWED]) & (nats_N >= BEYOND)
    seed_N = measured["after_prompt"] - measured["hash"]
    key_n = scramble((measured["prefix"][:, FOLLOWED] + seed_N)[known_N])
    return kept_keys(key_n, -nats_N[known_N], batch.by_step.only(known_N), batch.step_numbers, keys, largest=True)

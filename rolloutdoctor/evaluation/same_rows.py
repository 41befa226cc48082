"""Equal responses among the rows of a step, by their hashes; shared by the rules about rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.by_step import ByStep, named_counts
from rolloutdoctor.ops.kept_keys import kept_keys
from rolloutdoctor.ops.numbered import numbered
from rolloutdoctor.ops.prefix_hash import scramble

BIN, LAST = 2, 400
"""Width of the bins of nats, and where the last one starts."""

BINS = [str(nats) for nats in range(0, LAST + 1, BIN)]
"""Their names: where they start."""


@dataclass(frozen=True, eq=False)
class SameRows:
    """Equal responses of one step or several; the tensors are on the CPU.

    Attributes:
        counts: name of a field of `duplicate_responses.DuplicateTally` to its value in each step, ``[S]``.
        unlikely_N: ``[N]`` float64, nats of a response that a row repeats; 0 for other rows.
        response_N: ``[N]`` int64, number of each row's response; those of two steps are different ones.
        group_N: ``[N]`` int64, number of each row's group.
    """

    counts: Mapping[str, NDArray[Any] | Sequence[Any]]
    unlikely_N: Tensor
    response_N: Tensor
    group_N: Tensor

    def twin_of(self, row: int) -> int:
        """The first other row of the step with the same response, of the same group if there is one."""
        same_N = self.response_N == self.response_N[row]
        same_N[row] = False
        own_N = same_N & (self.group_N == self.group_N[row])
        return int((own_N if bool(own_N.any()) else same_N).nonzero()[0])


def _hashes(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> Tensor | None:
    return measured.get("hash", batch.per_row.get("response"))


def _shown(batch: RolloutBatch, measured: Mapping[str, Tensor], hash_N: Tensor) -> Tensor:
    """Rows that hold a response: with a token, or in a step without tokens with a text."""
    has_tokens_N = batch.rows.diff() > 0
    if "hash" in measured or "told" in measured:
        return has_tokens_N
    rows = batch.by_step
    return torch.where(rows.expand(rows.any(has_tokens_N)), has_tokens_N, hash_N != 0)


def _nats(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> Tensor:
    """Minus the log-prob of each row's response; 0 where nothing says it."""
    if "log_prob" not in measured:
        return torch.zeros(len(batch), dtype=torch.float64, device=batch.device)
    return (-measured["log_prob"]).clamp(min=0)


def compare_rows(batch: RolloutBatch, measured: Mapping[str, Tensor]) -> SameRows | None:
    """Compare the responses of each step.

    Args:
        batch: the steps.
        measured: `hash` of each row's response (else its text is taken), `log_prob` and `told`, the sum over the tokens
            with a log-prob and their number, where there are any.
    """
    # The rows of a step are few, and a GPU adds them up in no fixed order.
    batch = replace(batch, per_token={}).to("cpu") if batch.device.type != "cpu" else batch
    measured = {name: value_N.cpu() for name, value_N in measured.items()}
    hash_N = _hashes(batch, measured)
    if hash_N is None or batch.groups is None or not len(batch):
        return None
    rows, groups = batch.by_step, batch.groups_by_step
    is_shown_N, nats_N = _shown(batch, measured, hash_N), _nats(batch, measured)
    # Rows of another pass over a generated batch are no copies.
    parts = [batch.per_row[name] for name in ("generation_id",) if name in batch.per_row]
    group_N, response_N = batch.groups.index_N, numbered(rows.step_N, *parts, hash_N)
    group_n, response_n, nats_n = group_N[is_shown_N], response_N[is_shown_N], nats_N[is_shown_N]
    shown, kinds = rows.only(is_shown_N), int(response_N.max()) + 1
    # A kind is a response of a group; the likeliest of its copies says how likely it is.
    kind_K, kind_n, copies_K = torch.unique(group_n * kinds + response_n, return_inverse=True, return_counts=True)
    group_K, response_K = kind_K // kinds, kind_K % kinds
    size_G = torch.bincount(group_n, minlength=len(batch.groups))
    different_G = torch.bincount(group_K, minlength=len(size_G))
    squares_G = torch.bincount(group_K, copies_K.double() ** 2, len(size_G))
    full_G = size_G > 1
    full, size = groups.only(full_G), size_G[full_G].double()
    lost = 1 - (1 - squares_G[full_G] / size**2) / (1 - 1 / size)
    told_n = measured["told"][is_shown_N] > 0 if "told" in measured else torch.zeros_like(nats_n, dtype=torch.bool)
    chance_n = torch.where(told_n, _copy_chance(torch.exp(-nats_n), size_G[group_n].double()), 0.0)
    # Both are in the order of steps, as groups and rows are.
    kinds_by_step = ByStep.of_sizes(groups.count(different_G))
    step_R = torch.zeros(kinds, dtype=torch.int64).index_copy_(0, response_N, rows.step_N)
    responses_by_step = ByStep.of_sizes(np.bincount(step_R, minlength=len(rows)))
    again_R = torch.bincount(response_K, minlength=kinds) - 1
    is_again_n = (copies_K[kind_n] > 1) | (again_R[response_n] > 0)
    counts: dict[str, NDArray[Any] | Sequence[Any]] = {
        "rows": full.count(size),
        "groups": full.size,
        "different": full.count(different_G[full_G]),
        "alike": full.count(different_G[full_G] == 1),
        "lost": full.sum(lost),
        "pairs": full.sum(size * (size - 1) / 2),
        "all_pairs": shown.size * (shown.size - 1.0) / 2,
        "judged": shown.count(told_n),
        "expected": shown.sum(chance_n),
        "copies": _binned(kinds_by_step, _least(kind_n, nats_n, len(kind_K)), copies_K - 1),
        "across": _binned(responses_by_step, _least(response_n, nats_n, kinds), again_R.clamp(min=0)),
        "other_ranks": responses_by_step.count(_other_ranks(batch, is_shown_N, response_n, kinds)),
        "steps": np.ones(len(rows), np.int64),
    }
    unlikely_N = torch.zeros_like(nats_N).masked_scatter_(is_shown_N, torch.where(is_again_n, nats_n, 0.0))
    return SameRows(counts, unlikely_N, response_N, group_N)


def _least(index_n: Tensor, x_n: Tensor, count: int) -> Tensor:
    """Smallest value at each index, float64 ``[count]``; infinity where there is none."""
    return torch.full((count,), torch.inf, dtype=torch.float64).scatter_reduce_(0, index_n, x_n, "amin")


def _copy_chance(prob_n: Tensor, size_n: Tensor) -> Tensor:
    """Chance that a row repeats an earlier row of its group, from the probability of its response.

    Of a response with probability p, n draws hold n p on average and one or more with 1 - (1 - p)^n; what is beyond
    the first is copies. Each of the n p rows stands for its share of them.
    """
    least = 1e-6
    safe_n = prob_n.clamp(min=least)
    exact_n = 1 + torch.expm1(size_n * torch.log1p(-safe_n)) / (size_n * safe_n)
    return torch.where(prob_n < least, (size_n - 1) * prob_n / 2, exact_n)


def _binned(by_step: ByStep, nats: Tensor, count: Tensor) -> list[dict[str, float]]:
    """How many there are in each step by the lower end of their bin of nats."""
    index = (nats.nan_to_num(0.0).clamp(max=LAST) / BIN).long()
    return named_counts(by_step.histogram(index.numpy(), len(BINS), count.numpy()), BINS)


def _other_ranks(batch: RolloutBatch, is_shown_N: Tensor, response_n: Tensor, kinds: int) -> Tensor:
    """On how many ranks each response occurs again, ``[kinds]``."""
    rank_N = batch.per_row.get("rank")
    if rank_N is None:
        return torch.zeros(kinds, dtype=torch.int64)
    pairs = torch.unique((rank_N[is_shown_N] + 1) * kinds + response_n)
    return (torch.bincount(pairs % kinds, minlength=kinds) - 1).clamp(min=0)


def kept_responses(batch: RolloutBatch, measured: Mapping[str, Tensor], keys: int) -> list[dict[str, float]]:
    """Return the responses of each step with the smallest hashes, each with its log-prob, by hash and step.

    Only of prompts that are known across steps, and of rows with a log-prob. Of copies in a step the likeliest is kept,
    whatever their order.
    """
    if "after_prompt" not in measured or "log_prob" not in measured or batch.prompts is None:
        return [{} for _ in batch.step_numbers]
    known_N = (batch.prompts != 0) & (measured["told"] > 0)
    key_n, value_n = scramble(measured["after_prompt"][known_N]), measured["log_prob"][known_N]
    return kept_keys(key_n, value_n, batch.by_step.only(known_N), batch.step_numbers, keys, largest=True)

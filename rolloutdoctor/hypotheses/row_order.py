"""Hypotheses about columns that a trainer attached to other rows or other tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.objective.objective import Objective

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

Order = Callable[["RolloutBatch"], Tensor | None]
"""Gives the row whose reward each row gets, ``[N]``; None if a column is missing."""

REMEDY = "join rewards to rows by sample id, not by position, wherever rows are reordered, filtered or gathered"
REFERENCES = ("https://github.com/verl-project/verl/issues/2185", "https://github.com/huggingface/trl/issues/3098")


def moved_rewards(order: Order) -> "Callable[[RolloutBatch, Objective], RolloutBatch | None]":
    """Return the edit that gives every row the reward of another."""

    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        source_N = order(batch)
        if source_N is None or "reward" not in batch.per_row or len(batch) < 2:
            return None
        reward_N = batch.per_row["reward"]
        moved_N = reward_N[source_N]
        if torch.equal(moved_N.nan_to_num(), reward_N.nan_to_num()):
            return None
        columns = {"reward": moved_N}
        rewards = {name: each_N[source_N] for name, each_N in batch.rewards.items()}
        return replace(batch, per_row={**batch.per_row, **columns}, rewards=rewards)

    return edit


def _rolled(rows: int) -> Order:
    def order(batch: "RolloutBatch") -> Tensor:
        return torch.arange(len(batch), device=batch.device).roll(rows)

    return order


def _rolled_by_group(groups: int) -> Order:
    def order(batch: "RolloutBatch") -> Tensor | None:
        if batch.groups is None or len(batch.groups.sizes) != 1:
            return None
        return torch.arange(len(batch), device=batch.device).roll(groups * int(batch.groups.size_G[0]))

    return order


def _rolled_in_group(rows: int) -> Order:
    def order(batch: "RolloutBatch") -> Tensor | None:
        groups = batch.groups
        if groups is None:
            return None
        start_N, size_N = groups.offsets[:-1][groups.index_N], groups.size_G[groups.index_N]
        place_N = torch.empty_like(groups.order_N)
        place_N[groups.order_N] = torch.arange(len(batch), device=batch.device)
        source_N: Tensor = groups.order_N[start_N + (place_N - start_N - rows) % size_N]
        return source_N

    return order


def _reversed(batch: "RolloutBatch") -> Tensor:
    return torch.arange(len(batch), device=batch.device).flip(0)


def _sorted(key: str, *, descending: bool = False, inverse: bool = False) -> Order:
    """Rewards in the order of rows sorted by a key, rows unsorted; or the other way round."""

    def order(batch: "RolloutBatch") -> Tensor | None:
        if key == "length":
            value_N: Tensor | None = batch.rows.diff()
        else:
            value_N = batch.per_row.get(key)
        if value_N is None:
            return None
        source_N = torch.sort(value_N, stable=True, descending=descending).indices
        if inverse:
            back_N = torch.empty_like(source_N)
            back_N[source_N] = torch.arange(len(batch), device=batch.device)
            return back_N
        return source_N

    return order


ROW_ORDERS: Mapping[str, tuple[str, Order, tuple[str, ...]]] = {
    "rewards-one-row-late": ("every row has the reward of the row before it", _rolled(1), ()),
    "rewards-one-row-early": ("every row has the reward of the row after it", _rolled(-1), ()),
    "rewards-one-group-late": ("every row has the reward of the group before it", _rolled_by_group(1), ()),
    "rewards-one-group-early": ("every row has the reward of the group after it", _rolled_by_group(-1), ()),
    "rewards-rotated-late": (
        "within each group every row has the reward of the row before it",
        _rolled_in_group(1),
        (),
    ),
    "rewards-rotated-early": (
        "within each group every row has the reward of the row after it",
        _rolled_in_group(-1),
        (),
    ),
    "rewards-reversed": ("the rewards are in reversed order", _reversed, ()),
    "rewards-by-length": ("the rewards are in the order of response length, the rows are not", _sorted("length"), ()),
    "rewards-by-length-descending": (
        "the rewards are in the order of falling response length, the rows are not",
        _sorted("length", descending=True),
        (),
    ),
    "rows-by-length": (
        "the rows are in the order of response length, the rewards are not",
        _sorted("length", inverse=True),
        (),
    ),
    "rows-by-length-descending": (
        "the rows are in the order of falling response length, the rewards are not",
        _sorted("length", descending=True, inverse=True),
        (),
    ),
    "rewards-by-rank": ("the rewards are in the order of ranks, the rows are not", _sorted("rank"), ("rank",)),
    "rows-by-rank": (
        "the rows are in the order of ranks, the rewards are not",
        _sorted("rank", inverse=True),
        ("rank",),
    ),
    "rewards-sorted": ("the rewards are sorted, the rows are not", _sorted("reward"), ()),
    "rewards-sorted-descending": (
        "the rewards are sorted from high to low, the rows are not",
        _sorted("reward", descending=True),
        (),
    ),
}
"""Name to words, order and columns: which row's reward each row has."""

MISALIGNED_REWARDS = tuple(
    Hypothesis(
        name=name,
        code="RDI004",
        stage="advantages",
        words=words,
        remedy=REMEDY,
        rows=moved_rewards(order),
        columns=frozenset(columns),
        references=REFERENCES,
    )
    for name, (words, order, columns) in ROW_ORDERS.items()
)


def _shifted(column: str, tokens: int) -> "Callable[[RolloutBatch, Objective], RolloutBatch | None]":
    """Every token has the value of one some places before it in its row; the ends keep their own."""

    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        stored = batch.stored_name(column)
        if stored is None or stored not in batch.per_token or batch.tokens < 2:
            return None
        value_T = batch.per_token[stored]
        places_T = torch.arange(batch.tokens, device=batch.device)
        lengths_N = batch.rows.diff()
        first_T = torch.repeat_interleave(batch.rows[:-1], lengths_N)
        last_T = torch.repeat_interleave(batch.rows[1:] - 1, lengths_N)
        source_T = torch.minimum(torch.maximum(places_T - tokens, first_T), last_T)
        return replace(batch, per_token={**batch.per_token, column: value_T[source_T]})

    return edit


def _log_probs(column: str, whose: str, tokens: int) -> Hypothesis:
    side, word = ("late", "before") if tokens > 0 else ("early", "after")
    return Hypothesis(
        name=f"{column.split('_', maxsplit=1)[0]}-log-probs-one-token-{side}",
        code="RDI008",
        stage="kl",
        words=f"{whose} log-prob of every token is that of the token {word} it",
        remedy="align log-probs with the tokens they belong to: the logits at position t predict token t + 1",
        rows=_shifted(column, tokens),
        columns=frozenset({column}),
        references=("https://github.com/modelscope/ms-swift/issues/8196",),
    )


SHIFTED_LOG_PROBS = tuple(
    _log_probs(column, whose, tokens)
    for column, whose in (("ref_log_probs", "the reference's"), ("old_log_probs", "the old"))
    for tokens in (1, -1)
)


def _missing_as_zero(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    reward_N = batch.per_row.get("reward")
    if reward_N is None or not bool(reward_N.isnan().any()):
        return None
    rewards = {name: each_N.nan_to_num(0.0) for name, each_N in batch.rewards.items()}
    return replace(batch, per_row={**batch.per_row, "reward": reward_N.nan_to_num(0.0)}, rewards=rewards)


MISSING_REWARDS = (
    Hypothesis(
        name="missing-reward-as-zero",
        code="RDA005",
        stage="advantages",
        words="rows whose reward is missing enter the baseline with a reward of 0",
        remedy="leave rows that could not be scored out of the baseline, and give them no advantage",
        rows=_missing_as_zero,
        references=("https://github.com/huggingface/trl/issues/5773",),
    ),
)

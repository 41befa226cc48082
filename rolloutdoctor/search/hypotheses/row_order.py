"""Hypotheses about columns that a trainer attached to other rows or other tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.search.hypotheses.partitions import places

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

Order = Callable[["RolloutBatch"], Tensor | None]
"""Function that returns the row whose reward each row gets, ``[N]``; None if a column is missing."""

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


def _rolled_by_group(groups: int) -> Order:
    def order(batch: "RolloutBatch") -> Tensor | None:
        if batch.groups is None or len(batch.groups.sizes) != 1:
            return None
        return places(batch).roll(groups * int(batch.groups.size_G[0]))

    return order


def _rolled_in_group(rows: int) -> Order:
    def order(batch: "RolloutBatch") -> Tensor | None:
        groups = batch.groups
        if groups is None:
            return None
        start_N, size_N = groups.offsets[:-1][groups.index_N], groups.size_G[groups.index_N]
        place_N = torch.empty_like(groups.order_N)
        place_N[groups.order_N] = places(batch)
        source_N: Tensor = groups.order_N[start_N + (place_N - start_N - rows) % size_N]
        return source_N

    return order


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
            back_N[source_N] = places(batch)
            return back_N
        return source_N

    return order


_HAVE = "every row has the reward of the"
ROW_ORDERS: Mapping[str, tuple[str, Order]] = {
    "rewards-one-row-late": (f"{_HAVE} row before it", lambda batch: places(batch).roll(1)),
    "rewards-one-row-early": (f"{_HAVE} row after it", lambda batch: places(batch).roll(-1)),
    "rewards-one-group-late": (f"{_HAVE} group before it", _rolled_by_group(1)),
    "rewards-one-group-early": (f"{_HAVE} group after it", _rolled_by_group(-1)),
    "rewards-rotated-late": (f"within each group {_HAVE} row before it", _rolled_in_group(1)),
    "rewards-rotated-early": (f"within each group {_HAVE} row after it", _rolled_in_group(-1)),
    "rewards-reversed": ("the rewards are in reversed order", lambda batch: places(batch).flip(0)),
    **{
        f"{moved}-by-{key}{'-descending' if descending else ''}": (
            f"the {moved} are in the order of {'falling ' if descending else ''}{words}, the {fixed} are not",
            _sorted(key, descending=descending, inverse=moved == "rows"),
        )
        for key, words, orders in (("length", "response length", (False, True)), ("rank", "ranks", (False,)))
        for moved, fixed in (("rewards", "rows"), ("rows", "rewards"))
        for descending in orders
    },
    "rewards-sorted": ("the rewards are sorted, the rows are not", _sorted("reward")),
    "rewards-sorted-descending": (
        "the rewards are sorted from high to low, the rows are not",
        _sorted("reward", descending=True),
    ),
}
"""Name to words and order: which row's reward each row has."""

MISALIGNED_REWARDS = tuple(
    Hypothesis(
        name=name,
        code="RDI004",
        stage="advantages",
        words=words,
        remedy=REMEDY,
        rows=moved_rewards(order),
        columns=frozenset({"rank"} if name.endswith("-rank") else ()),
        references=REFERENCES,
    )
    for name, (words, order) in ROW_ORDERS.items()
)


Source = Callable[["RolloutBatch"], tuple[Tensor, Tensor] | None]
"""Function that returns the token whose value each token gets, ``[T]``, and where it gets 0 instead, ``[T]`` bool."""


def _misplaced(column: str, source: Source) -> "Callable[[RolloutBatch, Objective], RolloutBatch | None]":
    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        stored = batch.stored_name(column)
        if stored is None or stored not in batch.per_token or batch.tokens < 2:
            return None
        placement = source(batch)
        if placement is None:
            return None
        value_T = batch.per_token[stored][placement[0]]
        return replace(batch, per_token={**batch.per_token, column: torch.where(placement[1], 0.0, value_T)})

    return edit


def _late(by: Callable[[Tensor], Tensor], *, keeps_ends: bool) -> Source:
    """Every token has the value of one some places before it in its row, given the lengths of the rows, ``[N]``.

    Beyond the ends of the row it keeps its own, or has a 0 of the padding.
    """

    def source(batch: "RolloutBatch") -> tuple[Tensor, Tensor]:
        lengths_N = batch.rows.diff()
        first_T, last_T, late_T = (
            torch.repeat_interleave(x_N, lengths_N) for x_N in (batch.rows[:-1], batch.rows[1:] - 1, by(lengths_N))
        )
        wanted_T = torch.arange(batch.tokens, device=batch.device) - late_T
        source_T = torch.minimum(torch.maximum(wanted_T, first_T), last_T)
        return source_T, (source_T != wanted_T) & (not keeps_ends)

    return source


_one = torch.ones_like


def _one_back(lengths_N: Tensor) -> Tensor:
    return -torch.ones_like(lengths_N)


def _padding(lengths_N: Tensor) -> Tensor:
    return lengths_N.max() - lengths_N


def _of_row(rows: int) -> Source:
    """Every row has the values of the next (the last) one of its length."""

    def source(batch: "RolloutBatch") -> tuple[Tensor, Tensor] | None:
        lengths_N = batch.rows.diff()
        of_N = places(batch)
        for length in torch.unique(lengths_N).tolist():
            alike = (lengths_N == length).nonzero()[:, 0]
            of_N[alike] = alike.roll(rows)
        if bool((of_N == places(batch)).all()):
            return None
        moved_T = torch.repeat_interleave(batch.rows[of_N] - batch.rows[:-1], lengths_N)
        source_T = torch.arange(batch.tokens, device=batch.device) + moved_T
        return source_T, torch.zeros_like(source_T, dtype=torch.bool)

    return source


_PLACES: Mapping[str, tuple[str, Source]] = {
    "one-token-late": ("that of the token before it", _late(_one, keeps_ends=True)),
    "one-token-early": ("that of the token after it", _late(_one_back, keeps_ends=True)),
    "one-token-late-0-first": ("that of the token before it, the first 0", _late(_one, keeps_ends=False)),
    "one-token-early-0-last": ("that of the token after it, the last 0", _late(_one_back, keeps_ends=False)),
    "padding-late": (
        "that of a token as many places before it as its row has padding",
        _late(_padding, keeps_ends=False),
    ),
    "padding-early": (
        "that of a token as many places after it as its row has padding",
        _late(lambda lengths_N: -_padding(lengths_N), keeps_ends=False),
    ),
    "of-row-before": ("that of the row of equal length before it", _of_row(1)),
    "of-row-after": ("that of the row of equal length after it", _of_row(-1)),
}

MISPLACED_LOG_PROBS = tuple(
    Hypothesis(
        name=f"{column.split('_', maxsplit=1)[0]}-log-probs-{name}",
        code="RDI008",
        stage="kl",
        words=f"{whose} log-prob of every token is {words}",
        remedy="align log-probs with the rows and tokens they belong to: the logits at position t predict token t + 1",
        rows=_misplaced(column, source),
        columns=frozenset({column}),
        references=("https://github.com/modelscope/ms-swift/issues/8196",),
    )
    for column, whose in (("ref_log_probs", "the reference's"), ("old_log_probs", "the old"))
    for name, (words, source) in _PLACES.items()
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

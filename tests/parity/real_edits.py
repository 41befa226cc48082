"""What a fault changes: rows as the real code gets them, or what is logged of an update."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from parity.real_rows import regrouped
from parity.real_setup import GROUPS, SIZE
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch


def drawn_order(batch: RolloutBatch) -> Tensor:
    return torch.randperm(len(batch), generator=torch.Generator().manual_seed(batch.step))


def places(batch: RolloutBatch) -> Tensor:
    return torch.arange(len(batch))


def shuffled_groups(batch: RolloutBatch) -> RolloutBatch:
    """Rows of a prompt do not follow each other, and TRL takes it that they do."""
    return regrouped(batch, batch.groups.index_N[drawn_order(batch)])


def moved_rewards(source: Callable[[RolloutBatch], Tensor]) -> Callable[[RolloutBatch], RolloutBatch]:
    def edit(batch: RolloutBatch) -> RolloutBatch:
        source_N = source(batch)
        rewards = {name: x_N[source_N] for name, x_N in batch.rewards.items()}
        return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": batch.column("reward")[source_N]})

    return edit


def late(batch: RolloutBatch) -> Tensor:
    return places(batch).roll(1)


def few_late(batch: RolloutBatch) -> Tensor:
    """In the first eight rows alone."""
    places_N = places(batch)
    return torch.cat([places_N[:8].roll(1), places_N[8:]])


def by_reward(batch: RolloutBatch) -> Tensor:
    return torch.sort(batch.column("reward"), stable=True).indices


def unscored(batch: RolloutBatch) -> RolloutBatch:
    missing_N = torch.tensor(np.random.default_rng(batch.step).random(len(batch)) < 0.2)
    rewards = {name: x_N.masked_fill(missing_N, torch.nan) for name, x_N in batch.rewards.items()}
    reward_N = batch.column("reward").masked_fill(missing_N, torch.nan)
    return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": reward_N})


def as_zero(batch: RolloutBatch) -> RolloutBatch:
    rewards = {name: x_N.nan_to_num(0.0) for name, x_N in batch.rewards.items()}
    return replace(batch, rewards=rewards, per_row={**batch.per_row, "reward": batch.column("reward").nan_to_num(0.0)})


def shifted(column: str, tokens: int, fill: float | None = None) -> Callable[[RolloutBatch], RolloutBatch]:
    """Every token has the value of a neighbour; the end keeps its own, or has a filler."""

    def edit(batch: RolloutBatch) -> RolloutBatch:
        parts = []
        for row_T in batch.column(column).split(batch.rows.diff().tolist()):
            moved_T = row_T.roll(tokens)
            end = 0 if tokens > 0 else -1
            moved_T[end] = row_T[end] if fill is None else fill
            parts.append(moved_T)
        return replace(batch, per_token={**batch.per_token, column: torch.cat(parts)})

    return edit


def column_for(column: str, other: str) -> Callable[[RolloutBatch], RolloutBatch]:
    def edit(batch: RolloutBatch) -> RolloutBatch:
        return replace(batch, per_token={**batch.per_token, column: batch.column(other)})

    return edit


def far_reference(batch: RolloutBatch) -> RolloutBatch:
    """Some tokens are far more likely to the reference."""
    far_T = torch.tensor(np.random.default_rng(batch.step).random(batch.tokens) < 0.1)
    columns = {
        name: batch.column(name) - 6.0 * far_T for name in ("policy_log_probs", "old_log_probs", "rollout_log_probs")
    }
    columns["ref_log_probs"] = torch.where(far_T, batch.column("policy_log_probs"), batch.column("ref_log_probs"))
    return replace(batch, per_token={**batch.per_token, **columns})


def clamped(low: float, high: float) -> Callable[[RolloutBatch], RolloutBatch]:
    """A reference with which no token's KL is above 10."""

    def edit(batch: RolloutBatch) -> RolloutBatch:
        policy_T = batch.column("policy_log_probs").double()
        u_T = (batch.column("ref_log_probs").double() - policy_T).clamp(low, high)
        return replace(batch, per_token={**batch.per_token, "ref_log_probs": (policy_T + u_T).float()})

    return edit


TEN = 2.6108686
"""exp(u) - u - 1 is 10 there."""


def generated(batch: RolloutBatch) -> int:
    return int(batch.column("response_mask_pre").sum())


def times(name: str, factor: float):
    return lambda metrics, update, batch: {**metrics, name: factor * metrics[name]}


def of_every_row(name: str):
    """The metric as it is where every row is a micro-batch."""

    def log(metrics, update, batch):
        rows = replace(batch, per_row={**batch.per_row, "micro_batch_id": places(batch)})
        return {**metrics, name: update(rows)[name]}

    return log


def of_all_tokens(name: str):
    """The metric as it is where the step is one micro-batch."""

    def log(metrics, update, batch):
        rows = replace(batch, per_row={key: x for key, x in batch.per_row.items() if key != "micro_batch_id"})
        return {**metrics, name: update(rows)[name]}

    return log


def tiled(batch: RolloutBatch) -> Tensor:
    return places(batch) % GROUPS


def read_tiled(batch: RolloutBatch) -> Tensor:
    return places(batch).view(SIZE, GROUPS).T.flatten()

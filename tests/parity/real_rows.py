"""The rows of runs of the real code, drawn from a seed; and rows in another order, or with other groups."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from parity.real_setup import GROUPS, MICROS, SIZE, WEIGHTS, Setup
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.testing import random_batch

REWARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "tenths": lambda x: (x * 3).round() / 10,
    "far from zero": lambda x: 50 + x * 0.01,
}

"""Rewards that differ in every group."""

FLAT_REWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pass or fail": lambda x, _: (x > 0).double(),
    "flat groups": lambda x, first: torch.where(first % 8 == 0, x[:, first], x),
    "all groups flat": lambda x, first: x[:, first],
    "all equal": lambda x, _: torch.full_like(x, 0.7),
}
"""Rewards that are equal in some groups or in all, made of normal ones and the first row of each row's group."""


def rows_of(setup: Setup, step: int) -> RolloutBatch:
    """Rows of a step: six groups of four."""
    verl = setup.trainer == "verl"
    seed = 1000 * setup.seed + step
    batch = random_batch(
        seed,
        sizes=(SIZE,) * GROUPS,
        longest=12,
        empty=0.0,
        rejected=0.0,
        holes=0.0 if setup.trainer == "trl-rloo" else 0.1,
        adjacent=not verl,
    )
    draw = np.random.default_rng(seed)
    count = len(batch)

    def normal(width: float) -> Tensor:
        return torch.tensor(draw.normal(0, width, batch.tokens))

    policy_T = batch.column("policy_log_probs").double()
    old_T = policy_T + normal(setup.drift) if setup.drift else policy_T
    log_probs = {
        "policy_log_probs": policy_T,
        "old_log_probs": old_T,
        "ref_log_probs": policy_T + normal(0.3),
        "rollout_log_probs": old_T + normal(setup.sampled),
    }
    # A token moves below 0 as a whole: its differences are those drawn.
    lower_T = torch.stack(list(log_probs.values())).amax(0).relu() - policy_T / 8
    log_probs = {name: column_T - lower_T for name, column_T in log_probs.items()}
    columns = {
        **log_probs,
        "entropy": torch.tensor(draw.random(batch.tokens)),
        "values": normal(1.0),
        "sum_pi_squared": log_probs["policy_log_probs"].exp().square(),
    }
    per_token = {name: column_T.float() for name, column_T in columns.items()}
    # Every response has a token of the model; a filter masks it as a whole.
    pre_T = batch.column("response_mask_pre").clone()
    pre_T[batch.rows[:-1][batch.rows.diff() > 0]] = True
    kept_N = torch.tensor(draw.random(count) >= setup.rejected)
    ended_N = torch.tensor(draw.random(count) >= 0.2)
    if setup.options.get("mask_truncated_completions"):
        kept_N = ended_N
    per_token["response_mask_pre"] = pre_T
    per_token["response_mask"] = pre_T & torch.repeat_interleave(kept_N, batch.rows.diff())
    drawn_RN = torch.tensor(draw.normal(size=(2, count)))
    first_G = batch.groups.order_N[batch.groups.offsets[:-1]]
    if setup.rewards in REWARDS:
        drawn_RN = REWARDS[setup.rewards](drawn_RN)
        # Two equal rewards in each group are no accident of the draw: no group is without a signal.
        drawn_RN[:, first_G] += 1.0
    else:
        drawn_RN = FLAT_REWARDS[setup.rewards](drawn_RN, first_G[batch.groups.index_N])
    drawn_RN = drawn_RN.float().double()
    drawn_RN[:, torch.tensor(draw.random(count) < setup.unscored)] = torch.nan
    per_row = {"reward_baseline": torch.tensor(draw.normal(size=count)).float().double()}
    if verl:
        per_row["reward"] = drawn_RN[0]
        rewards: dict[str, Tensor] = {}
    else:
        rewards = {"f0": drawn_RN[0], "f1": drawn_RN[1]}
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)[:, None]
        per_row["reward"] = (weights * drawn_RN).sum(0)
    places = torch.arange(count)
    if setup.layout != "whole":
        per_row["micro_batch_id"] = places * MICROS // count
    if setup.layout == "two updates":
        per_row["optim_step_id"] = places * 2 // count
    return replace(
        batch,
        step=step,
        per_row=per_row,
        per_token=per_token,
        rewards=rewards,
        statuses=["stop" if ended else "length" for ended in ended_N.tolist()],
        sample_ids=[f"{step}/{row}" for row in range(count)],
        group_ids=[f"{step}/{group}" for group in range(GROUPS)],
    )


def reordered(batch: RolloutBatch, source_N: Tensor) -> RolloutBatch:
    """The rows in another order; groups go by position."""
    parts = torch.arange(batch.tokens).split(batch.rows.diff().tolist())
    source_T = torch.cat([parts[row] for row in source_N.tolist()])
    return replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[source_N].cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[source_N]),
        per_row={name: x_N[source_N] for name, x_N in batch.per_row.items()},
        per_token={name: batch.column(name)[source_T] for name in batch.per_token},
        rewards={name: x_N[source_N] for name, x_N in batch.rewards.items()},
        statuses=[batch.statuses[row] for row in source_N.tolist()],
        sample_ids=[batch.sample_ids[row] for row in source_N.tolist()],
    )


def regrouped(batch: RolloutBatch, index_N: Tensor) -> RolloutBatch:
    """The rows with other groups."""
    groups = Groups.of(torch.unique(index_N, return_inverse=True)[1])
    return replace(batch, groups=groups, group_ids=[f"{batch.step}/{group}" for group in range(len(groups))])

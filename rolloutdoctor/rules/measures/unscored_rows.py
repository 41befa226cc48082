"""Rows with a reward of 0 that stands for none, and what the advantages are without them."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.data.schema import FAILED
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.evaluation.response_ends import has_status
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.results.errors import CannotComputeError

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


def unscored_rows(step: "StepView") -> Tensor:
    """Rows with a reward of 0 and a witness that it is none, or without one that the trainer takes as 0, ``[N]``."""
    batch, reward_N, by_step = step.batch, step.batch.column("reward"), step.by_step
    witness_N = has_status(step.statuses, FAILED, batch.device)
    witness_N |= has_status(batch.errors or [None] * len(batch), None, batch.device)
    if batch.rewards:
        null_N = torch.stack([each_N.isnan() for each_N in batch.rewards.values()]).all(0)
        # Other rewards than 0 without any function: the file does not hold all functions of these rows.
        lacks_some = by_step.any(null_N & reward_N.isfinite() & (reward_N != 0))
        witness_N |= null_N & by_step.expand(~lacks_some & ~by_step.all(null_N))
    objective = None if step.evaluation is None else step.evaluation.objective
    as_zero = objective is not None and objective.advantage.null_is_zero
    return (witness_N & (reward_N == 0)) | (reward_N.isnan() & as_zero)


def without_rows(step: "StepView", missing_N: Tensor) -> tuple[Tensor, ...]:
    """Advantages and baselines with rows left out, and rounding radii, ``[N]`` each; NaN, NaN and -1 where unknown."""
    # Mostly no step has any.
    parts = zip(step.each, step.split(missing_N), strict=True) if bool(missing_N.any()) else [(step, missing_N)]
    return torch.cat([_without(each, missing_n) for each, missing_n in parts]).unbind(1)


def _without(step: "StepView", missing_N: Tensor) -> Tensor:
    batch = step.batch
    unknown = torch.tensor([torch.nan, torch.nan, -1.0], dtype=torch.float64, device=batch.device)
    nothing = unknown.expand(len(batch), 3)
    evaluation = step.evaluation if bool(missing_N.any()) else None
    if evaluation is None or evaluation.rows is None:
        return nothing
    objective = evaluation.objective
    sums_tokens = objective.advantage.sums_tokens and "token_rewards" in batch.per_token
    if objective.advantage.spec.axis is not Axis.ROWS or sums_tokens:
        return nothing
    reward_N = torch.where(missing_N, torch.nan, batch.column("reward"))
    scored = replace(batch, per_row={**batch.per_row, "reward": reward_N})
    leaving = replace(
        objective,
        advantage=replace(objective.advantage, null_is_zero=False),
        baseline_rows=objective.baseline_rows.leaving_out(RowSet.UNSCORED),
    )
    try:
        rows = evaluate_rows(scored, leaving, evaluation.dtype)
    except CannotComputeError:
        return nothing
    assert rows is not None
    assert rows.advantage_N is not None
    assert rows.baseline_N is not None
    return torch.stack([rows.advantage_N, rows.baseline_N, step.advantage_radius()], 1)

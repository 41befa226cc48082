"""Logged values that can be compared with a step's rows: metrics, and advantages and KL that the trainer stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.logged_digits import Digits


@dataclass(frozen=True, eq=False)
class LoggedStep:
    """Values that were logged at one step.

    Attributes:
        batch: the rows as they were logged.
        metrics: name to the value logged at the step.
        digits: name of a metric to what its values may have been rounded to.
        advantage_range: least and largest logged advantage of the trained tokens of each row, ``[N]`` float64 each;
            the larger is below the smaller for a row without any. None if no advantages per token were logged.
        omits_rows: the rows come from a dump that need not hold all rows of the step.
    """

    batch: RolloutBatch
    metrics: Mapping[str, float]
    digits: Mapping[str, tuple[Digits, ...]] = field(default_factory=dict)
    advantage_range: tuple[Tensor, Tensor] | None = None
    omits_rows: bool = False


def measure_advantages(block: TokenBlock) -> Mapping[str, Tensor]:
    """Return the least and the largest logged advantage over the trained tokens of each row, ``[n]``."""
    logged_T = block.column("advantages").double()
    low_T, high_T = (torch.where(block.trained_T, logged_T, none) for none in (torch.inf, -torch.inf))
    return {"low": seg.low(low_T, block.runs.offsets), "high": seg.high(high_T, block.runs.offsets)}


def has_row_advantages(batch: RolloutBatch, objective: Objective) -> bool:
    """Return True if advantages per token were logged of an estimator that gives one to each row."""
    is_logged = "advantages" in batch.per_token and "advantage" not in batch.per_row
    return is_logged and "response_mask" in batch.per_token and objective.advantage.spec.axis is Axis.ROWS


def row_advantages(logged: LoggedStep) -> Tensor | None:
    """Return the logged advantage of each row, ``[N]`` float64, NaN where there is none; None: none was logged."""
    if "advantage" in logged.batch.per_row:
        return logged.batch.column("advantage").double()
    if logged.advantage_range is None:
        return None
    low_N, high_N = logged.advantage_range
    return torch.where(low_N == high_N, low_N, torch.nan)


def logs_anything(batch: RolloutBatch, metrics: Mapping[str, float]) -> bool:
    """Return True if something was logged at a step that could be compared."""
    return bool(metrics) or any(batch.has(name) for name in LOGGED_COLUMNS)


def of_step(
    batch: RolloutBatch,
    metrics: Mapping[str, float],
    objective: Objective,
    digits: Mapping[str, tuple[Digits, ...]] | None = None,
    measured: Mapping[str, Tensor] | None = None,
    *,
    omits_rows: bool = False,
) -> LoggedStep:
    """Gather what was logged at a step.

    Args:
        batch: the rows as they were logged.
        metrics: name to the value logged at the step.
        objective: tells whether advantages belong to rows or to tokens.
        digits: name of a metric to what its values may have been rounded to.
        measured: what `measure_advantages` gave for the rows, where it was called in the token pass.
        omits_rows: the rows come from a dump that need not hold all rows of the step.
    """
    advantage_range = None
    if has_row_advantages(batch, objective):
        if measured is None:
            measured = measure_advantages(TokenBlock(batch, slice(0, len(batch)), slice(0, batch.tokens)))
        advantage_range = measured["low"], measured["high"]
    return LoggedStep(batch, metrics, digits or {}, advantage_range, omits_rows)

"""The columns of the table `rows`: what is known of a response once its step was evaluated.

One explicit table, which the rules, `export` and docs/python.md share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.evaluation.rows import RowResult
from rolloutdoctor.evaluation.token_sums import TokenSums

if TYPE_CHECKING:
    from polars._typing import PolarsDataType


@dataclass(frozen=True)
class RowColumn:
    """One column of `rows`.

    Attributes:
        name: of the column; of an evaluation with a fix it stands behind the fix, ``zero-std:kl/advantage``.
        unit: what one of it is.
        meaning: one line.
        source: what it is taken from: ``file``, ``batch``, ``rows`` or ``tokens`` (the two passes of an evaluation).
        value: ``[N]`` values; None where the step has none.
        dtype: of the values in the table.
    """

    name: str
    unit: str
    meaning: str
    source: str
    value: Callable[[RolloutBatch, Evaluation | None], Tensor | None]
    dtype: "PolarsDataType" = pl.Float64


def _of_batch(name: str, unit: str, meaning: str, value: Callable[[RolloutBatch], Tensor | None]) -> RowColumn:
    return RowColumn(name, unit, meaning, "batch", lambda batch, _: value(batch), pl.Int64)


def _of_rows(name: str, unit: str, meaning: str, value: Callable[[RowResult], Tensor | None]) -> RowColumn:
    def of_step(batch: RolloutBatch, evaluation: Evaluation | None) -> Tensor | None:
        return None if evaluation is None or evaluation.rows is None else value(evaluation.rows)

    return RowColumn(name, unit, meaning, "rows", of_step, pl.Boolean if unit == "bool" else pl.Float64)


def _of_tokens(name: str, unit: str, meaning: str, value: Callable[[TokenSums], Tensor | None]) -> RowColumn:
    def of_step(batch: RolloutBatch, evaluation: Evaluation | None) -> Tensor | None:
        return None if evaluation is None or evaluation.tokens is None else value(evaluation.tokens)

    return RowColumn(name, unit, meaning, "tokens", of_step)


def _loss(batch: RolloutBatch, evaluation: Evaluation | None) -> Tensor | None:
    if evaluation is None or evaluation.tokens is None:
        return None
    part = evaluation.tokens
    return part.policy_N * part.policy_weight_N + part.kl_loss_N * part.weight_N + evaluation.entropy_loss_N


def _recorded(name: str) -> RowColumn:
    """A number of the file, as it is."""
    unit = "reward" if name.startswith("reward") else "advantage" if name == "advantage" else "1"
    column = "logged_advantage" if name == "advantage" else name
    dtype = pl.Int64 if BY_NAME[name].kind is Kind.INTEGER else pl.Float64
    return RowColumn(column, unit, BY_NAME[name].meaning, "file", lambda batch, _: batch.per_row.get(name), dtype)


def _trained(batch: RolloutBatch) -> Tensor | None:
    return batch.trained.diff() if "response_mask" in batch.per_token else None


RECORDED = tuple(
    _recorded(name) for name, column in BY_NAME.items() if column.kind in (Kind.INTEGER, Kind.NUMBER) and name != "step"
)

ROW_COLUMNS: Mapping[str, RowColumn] = {
    column.name: column
    for column in (
        *RECORDED,
        _of_batch(
            "prompt", "hash", "the same for rows of one prompt in any step; 0: unknown", lambda batch: batch.prompts
        ),
        _of_batch(
            "task", "hash", "the same for rows of one task in any step; 0: unknown", lambda x: x.per_row.get("task_id")
        ),
        _of_batch("tokens", "tokens", "response tokens, masked ones included", lambda batch: batch.rows.diff()),
        _of_batch("trained_tokens", "tokens", "response tokens that the mask trains", _trained),
        _of_rows("score", "reward", "the reward that the estimator sees, any KL penalty included", lambda x: x.score_N),
        _of_rows("in_baseline", "bool", "the row enters baselines and scales", lambda x: x.in_baseline_N),
        _of_rows(
            "zero_std",
            "bool",
            "the group has two baseline rows or more, all of one reward",
            lambda x: x.zero_std_N,
        ),
        _of_rows("advantage", "advantage", "recomputed; null: the estimator has one a token", lambda x: x.advantage_N),
        _of_rows("baseline", "reward", "what was subtracted from the score", lambda x: x.baseline_N),
        _of_tokens("weight", "1", "weight of a token of the row in the loss of the step", lambda x: x.weight_N),
        _of_tokens("policy_weight", "1", "the same in the policy loss alone", lambda x: x.policy_weight_N),
        _of_tokens("policy_loss", "loss", "of the step, by row", lambda x: x.policy_N * x.policy_weight_N),
        _of_tokens("kl_loss", "loss", "of the step, by row", lambda x: x.kl_loss_N * x.weight_N),
        RowColumn("loss", "loss", "policy loss, KL loss and entropy bonus, by row", "tokens", _loss),
        _of_tokens("kl", "nats", "sum over the trained tokens, without coefficient", lambda x: x.kl_N),
        _of_tokens("grad_l1", "1", "sum of abs(dloss / dlogp) over the tokens", lambda x: x.grad_l1_N),
        _of_tokens("grad_sq", "1", "sum of (dloss / dlogp)^2 over the tokens", lambda x: x.grad_sq_N),
        _of_tokens("versus_l1", "1", "sum of abs(change of dloss / dlogp) by the fix", lambda x: x.versus_l1_N),
        _of_tokens("versus_dot", "1", "sum of products of dloss / dlogp with and without it", lambda x: x.versus_dot_N),
    )
}
"""Name to column; those of a fix are ``FIX/NAME``, those that a rule measured ``RULE/NAME``."""


def row_column(
    name: str,
    batch: RolloutBatch,
    evaluations: Mapping[str, Evaluation],
    measured: Mapping[str, Mapping[str, Tensor | None]],
) -> pl.Series:
    """Return one column of the rows of a step, or of several; it is null where they have none.

    Args:
        name: of `ROW_COLUMNS`, or ``FIX/NAME``, ``rewards/NAME``, ``RULE/NAME``.
        batch: the rows.
        evaluations: fix to the evaluation; `AS_CONFIGURED` is that without one.
        measured: rule to what it measured of the rows, by name.
    """
    owner, _, bare_name = name.partition("/") if "/" in name else ("", "", name)
    dtype: PolarsDataType | None = None
    if owner == "rewards":
        x_N = batch.rewards.get(bare_name)
    elif owner in measured:
        x_N = measured[owner].get(bare_name)
    elif bare_name in ROW_COLUMNS:
        column = ROW_COLUMNS[bare_name]
        x_N, dtype = column.value(batch, evaluations.get(owner or AS_CONFIGURED)), column.dtype
    else:
        x_N = None
    if x_N is None:
        return pl.Series(name, [None], dtype=dtype or pl.Float64).new_from_index(0, len(batch))
    series = pl.Series(name, x_N.cpu().numpy())
    return series if dtype is None else series.cast(dtype)

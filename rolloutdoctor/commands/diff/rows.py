"""Changes of every row: the table that `diff` queries, one line a row and changed side."""

from collections.abc import Sequence

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.breakdown import parts_of_rows
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult
from rolloutdoctor.evaluation.row_changes import ROUNDING
from rolloutdoctor.ops import segments as seg

STEP = ("side", "step", "split")
"""Columns that name a step on a changed side."""

NUMBERS = (
    *("advantage", "advantage_after", "advantage_gap", "baseline", "baseline_after"),
    *("policy_loss", "policy_loss_after", "kl_loss", "kl_loss_after", "kl", "kl_after"),
    *("grad_l1", "grad_l1_after", "grad_sq", "grad_sq_after", "versus_l1", "versus_dot"),
    *("weight", "weight_after", "policy_weight", "policy_weight_after", "reward", "part"),
)
"""Columns of numbers; null where a step does not give them."""

EMPTY = pl.DataFrame(
    schema={"side": pl.String, "step": pl.Int64, "split": pl.String, "row": pl.Int64, "group": pl.Int64}
    | {"group_id": pl.String, "sample_id": pl.String, "live": pl.Boolean, "compared": pl.Boolean}
    | {"tokens": pl.Int64, "tokens_after": pl.Int64, "same_scope": pl.Boolean}
    | dict.fromkeys(NUMBERS, pl.Float64)
)


def side_rows(
    side: str,
    before: Evaluation,
    after: Evaluation,
    each: Sequence[tuple[Evaluation, Evaluation]] = (),
    *,
    by: str | None,
    named: bool,
) -> pl.DataFrame:
    """Return the rows of a step, or of several, under the run's options and on a changed side.

    Args:
        side: its label.
        before: as configured.
        after: changed, evaluated against `before`.
        each: the two of each step, where they are of several.
        by: kind of part that `part` is to be, of those that are a number of a row.
        named: give the names of groups and rows.
    """
    batch, count = before.batch, len(before.batch)
    each = each or [(before, after)]
    columns: dict[str, Tensor] = {
        "step": batch.number_N,
        "row": batch.row_N,
        "live": torch.ones(count, dtype=torch.bool),
    }
    if batch.groups is not None:
        columns["group"] = batch.group_N
    if by is not None:
        columns["part"] = parts_of_rows(by, batch)
    if batch.has("reward"):
        columns["reward"] = batch.column("reward").double()
    if before.rows is not None and after.rows is not None:
        if before.rows.length_N is not None:
            columns["live"] = before.rows.length_N > 0
        columns |= {"compared": torch.ones(count, dtype=torch.bool)} | _advantages(before, after)
        if before.rows.baseline_N is not None and after.rows.baseline_N is not None:
            columns |= {"baseline": before.rows.baseline_N, "baseline_after": after.rows.baseline_N}
        columns |= _losses(before, after)
        if "tokens" in columns:
            # Some scopes depend on the other rows of the step.
            columns["same_scope"] = torch.cat([_same_scope(*pair) for pair in each])
    frame = pl.DataFrame([pl.Series(name, x_N.cpu().numpy()) for name, x_N in columns.items()])
    names = [_names(before.batch) for before, _ in each] if named else []
    return frame.with_columns(side=pl.lit(side), split=pl.lit(batch.split)).with_columns(
        pl.Series(name, [name_n for step_names in names for name_n in step_names[name]], pl.String)
        for name in (names[0] if names else ())
    )


def _names(batch: RolloutBatch) -> dict[str, list[str | None]]:
    """Names of the groups and rows of a step."""
    index = [] if batch.groups is None else batch.groups.index_N.tolist()
    return {
        "group_id": [None] * len(batch) if batch.groups is None else [batch.group_name(group) for group in index],
        "sample_id": [batch.sample_name(row) for row in range(len(batch))],
    }


def _losses(before: Evaluation, after: Evaluation) -> dict[str, Tensor]:
    """Shares of the rows in loss and gradient, and the weights of their tokens; nothing where there is no loss."""
    tokens, tokens_after = before.tokens, after.tokens
    if tokens is None or tokens_after is None or before.rows is None or before.rows.length_N is None:
        return {}
    length_N = before.rows.length_N.long()
    columns = {
        "tokens": length_N,
        "tokens_after": length_N,
        "versus_l1": tokens_after.versus_l1_N,
        "versus_dot": tokens_after.versus_dot_N,
    }
    for end, x in (("", tokens), ("_after", tokens_after)):
        columns |= {
            f"policy_loss{end}": x.policy_N * x.policy_weight_N,
            f"kl_loss{end}": x.kl_loss_N * x.weight_N,
            f"kl{end}": x.kl_N,
            f"grad_l1{end}": x.grad_l1_N,
            f"grad_sq{end}": x.grad_sq_N,
            f"weight{end}": x.weight_N,
            f"policy_weight{end}": x.policy_weight_N,
        }
    return columns


def _same_scope(before: Evaluation, after: Evaluation) -> Tensor:
    """Rows that are in or out of the policy term and the KL term on both sides, ``[N]`` bool."""
    same_N = torch.ones(len(before.batch), dtype=torch.bool, device=before.batch.device)
    for scope in ("policy", "kl"):
        inside_N = before.in_scope(getattr(before.objective, scope))
        same_N &= inside_N == after.in_scope(getattr(after.objective, scope))
    return same_N


def _advantages(before: Evaluation, after: Evaluation) -> dict[str, Tensor]:
    """Advantage of every row before and after, and the absolute change, ``[N]`` each.

    Of an estimator with a time axis they are means over the trained tokens.
    """
    rows_before, rows_after = before.rows, after.rows
    assert rows_before is not None
    assert rows_after is not None
    if rows_before.advantage_N is not None and rows_after.advantage_N is not None:
        gap_N = (rows_before.advantage_N - rows_after.advantage_N).abs()
        return {"advantage": rows_before.advantage_N, "advantage_after": rows_after.advantage_N, "advantage_gap": gap_N}
    mask_T, rows = before.batch.column("response_mask"), before.batch.rows
    one_T, other_T = _per_token(rows_before, rows), _per_token(rows_after, rows)

    def mean(x_T: Tensor) -> Tensor:
        return seg.total(torch.where(mask_T, x_T, 0.0), rows) / seg.total(mask_T, rows).clamp(min=1)

    gap_T = (one_T - other_T).abs()
    return {"advantage": mean(one_T), "advantage_after": mean(other_T), "advantage_gap": mean(gap_T)}


def _per_token(part: RowResult, rows: Tensor) -> Tensor:
    if part.advantage_N is not None:
        return seg.expand(part.advantage_N, rows)
    assert part.advantage_T is not None  # a first pass has one of the two
    return part.advantage_T.double()


def with_changes(rows: pl.DataFrame) -> pl.DataFrame:
    """Add what changes of each row, beyond rounding.

    `shifted` has another advantage (`undefined`: NaN on one side only) and `shift` its size, `flips` the other sign;
    `drifted` has another baseline and `drift` its size; `same` keeps advantage and scopes, and of these `rescaled`
    has tokens of another weight in the loss, `weight_ratio` times.
    """
    live, advantage, advantage_after = pl.col("live"), pl.col("advantage"), pl.col("advantage_after")
    gap, drift = pl.col("advantage_gap"), (pl.col("baseline") - pl.col("baseline_after")).abs()
    undefined = (live & (advantage.is_nan() != advantage_after.is_nan())).fill_null(value=False)
    weights = [pl.col(name) for name in ("weight", "weight_after", "policy_weight", "policy_weight_after")]
    ratio = pl.col("policy_weight_after") / pl.col("policy_weight")
    of_kl = pl.col("weight_after") / pl.col("weight")
    is_rescaled = ((ratio - 1).abs() > ROUNDING) | ((of_kl - 1).abs() > ROUNDING)
    return (
        rows.with_columns(
            undefined=undefined,
            shifted=undefined | (live & _is_change(gap, "advantage", "advantage_after")),
            drifted=live & _is_change(drift, "baseline", "baseline_after"),
        )
        .with_columns(
            shift=pl.when(pl.col("shifted") & ~pl.col("undefined")).then(gap).otherwise(0.0),
            flips=pl.col("shifted") & (advantage * advantage_after < 0),
            drift=pl.when("drifted").then(drift).otherwise(0.0),
            same=pl.all_horizontal(live, ~pl.col("shifted"), "same_scope", *(each > 0 for each in weights)).fill_null(
                value=False
            ),
        )
        .with_columns(rescaled=pl.col("same") & is_rescaled, weight_ratio=pl.when("same").then(ratio))
    )


def _is_change(gap: pl.Expr, *names: str) -> pl.Expr:
    """True where a gap is more than rounding of the largest value of the step; see `row_changes.is_change`."""
    sizes = [pl.when(pl.col(name).is_finite()).then(pl.col(name).abs()) for name in names]
    largest = pl.max_horizontal(*sizes).max().over(STEP).fill_null(0.0)
    # For polars NaN is above every number.
    return (gap.is_not_nan() & (gap > ROUNDING * largest)).fill_null(value=False)

"""The numbers of `diff`: totals of rows, and measures as expressions over them."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rolloutdoctor.commands.diff.rows import EMPTY, STEP, with_changes
from rolloutdoctor.results.findings import Measure

_COUNTS = (
    *("live", "compared", "shifted", "undefined", "flips", "drifted", "same", "rescaled"),
    *("tokens", "tokens_after"),
)
_SUMS = (
    *("shift", "drift", "policy_loss", "policy_loss_after", "kl_loss", "kl_loss_after", "kl", "kl_after"),
    *("grad_l1", "grad_l1_after", "grad_sq", "grad_sq_after", "versus_l1", "versus_dot"),
    *("weight_ratio", "same_sq", "same_dot"),
)
_LARGEST = ("shift_max", "drift_max", "weight_high")

Totals = Mapping[str, Any]
"""Totals of some rows, by name."""


def step_totals(rows: pl.DataFrame, by: Sequence[str] = ()) -> pl.DataFrame:
    """Add up the rows of each step and changed side, or of each part of it.

    Args:
        rows: whole steps, as `side_rows` gives them.
        by: the columns that name a part.
    """
    of_groups = pl.col("group").drop_nulls()
    same_sq, same_dot = (pl.col(name).filter("same").sum() for name in ("grad_sq", "versus_dot"))
    lines = with_changes(rows).group_by(*STEP, *by, maintain_order=True)
    return lines.agg(
        rows=pl.len().cast(pl.Int64),
        groups=of_groups.n_unique().cast(pl.Int64),
        shifted_groups=pl.col("group").filter("shifted").drop_nulls().n_unique().cast(pl.Int64),
        steps=pl.col("versus_l1").is_not_null().any().cast(pl.Int64),
        same_sq=same_sq,
        same_dot=same_dot,
        shift_max=pl.max("shift"),
        drift_max=pl.max("drift"),
        weight_low=pl.min("weight_ratio"),
        weight_high=pl.max("weight_ratio"),
        **{name: pl.sum(name).cast(pl.Int64) for name in _COUNTS},
        **{name: pl.sum(name) for name in _SUMS if not name.startswith("same_")},
    )


def no_totals() -> pl.DataFrame:
    """Return the totals of no rows; a query, which may not run before a process is forked."""
    return step_totals(EMPTY)


def totals() -> dict[str, pl.Expr]:
    """Totals of totals, as expressions over lines of `step_totals`."""
    low, high = {"weight_low": pl.min("weight_low")}, {name: pl.max(name) for name in _LARGEST}
    names = ("rows", "groups", "shifted_groups", "steps", *_COUNTS, *_SUMS)
    return {name: pl.sum(name) for name in names} | low | high


def quantities(steps: pl.Expr) -> dict[str, tuple[pl.Expr, str]]:
    """Return the measures that users see over totals, each with its unit.

    Args:
        steps: what losses are divided by, so that the parts of a run add up to its mean.
    """
    col = pl.col

    def ratio(part: pl.Expr, total: pl.Expr) -> pl.Expr:
        return pl.when((total != 0) & (part / total).is_finite()).then(part / total)

    def compared(name: str) -> pl.Expr:
        return pl.when(col("compared") > 0).then(name)

    def evaluated(value: pl.Expr) -> pl.Expr:
        return pl.when(steps > 0).then(value)

    root, root_after = col("grad_sq").sqrt(), col("grad_sq_after").sqrt()
    has_same = col("same") > 0
    return {
        "rows": (col("rows"), "rows"),
        "unmasked_rows": (col("live"), "rows"),
        "groups": (col("groups"), "groups"),
        "changed_rows": (compared("shifted"), "rows"),
        "changed_groups": (compared("shifted_groups"), "groups"),
        "undefined_rows": (compared("undefined"), "rows"),
        "advantage_shift_mean": (ratio(col("shift"), col("shifted") - col("undefined")), "advantage"),
        "advantage_shift_max": (compared("shift_max"), "advantage"),
        "sign_flips": (compared("flips"), "rows"),
        "drifted_rows": (compared("drifted"), "rows"),
        "baseline_drift_mean": (ratio(col("drift"), col("drifted")), "reward"),
        "baseline_drift_max": (compared("drift_max"), "reward"),
        "loss_before": (ratio(col("policy_loss") + col("kl_loss"), steps), "loss"),
        "loss_after": (ratio(col("policy_loss_after") + col("kl_loss_after"), steps), "loss"),
        "policy_loss_before": (ratio(col("policy_loss"), steps), "loss"),
        "policy_loss_after": (ratio(col("policy_loss_after"), steps), "loss"),
        "kl_loss_before": (ratio(col("kl_loss"), steps), "loss"),
        "kl_loss_after": (ratio(col("kl_loss_after"), steps), "loss"),
        "kl_before": (ratio(col("kl"), col("tokens")), "nats"),
        "kl_after": (ratio(col("kl_after"), col("tokens_after")), "nats"),
        "grad_l1_before": (evaluated(col("grad_l1")), "1"),
        "grad_l1_after": (evaluated(col("grad_l1_after")), "1"),
        "grad_l2_before": (evaluated(root), "1"),
        "grad_l2_after": (evaluated(root_after), "1"),
        "spurious_share_l1": (ratio(col("versus_l1"), col("grad_l1")), "share"),
        "relative_change_l1": (ratio(col("versus_l1"), col("grad_l1_after")), "share"),
        "kappa": (ratio(col("versus_dot"), col("grad_sq_after")), "1"),
        "cosine": (ratio(col("versus_dot"), root * root_after), "1"),
        "other_rows": (evaluated(col("same")), "rows"),
        "other_rows_rescaled": (evaluated(col("rescaled")), "rows"),
        "other_rows_scale": (ratio(col("same_dot"), col("same_sq")), "1"),
        "weight_ratio_mean": (ratio(col("weight_ratio"), col("same")), "1"),
        "weight_ratio_min": (pl.when(has_same).then("weight_low"), "1"),
        "weight_ratio_max": (pl.when(has_same).then("weight_high"), "1"),
    }


def measures(lines: pl.DataFrame, steps: float | None = None) -> list[dict[str, Measure]]:
    """Return the measures of each line of totals.

    Args:
        lines: of `step_totals`, or totals of them.
        steps: what losses are divided by; None: each line's own steps.
    """
    asked = quantities(pl.col("steps") if steps is None else pl.lit(steps))
    table = lines.select(**{name: value for name, (value, _) in asked.items()})
    units = {name: unit for name, (_, unit) in asked.items()}
    return [{name: Measure(value, units[name]) for name, value in line.items()} for line in table.to_dicts()]


def differs(line: Totals) -> bool:
    """True if advantages, baselines, losses or gradients of some rows are others."""
    names = ("policy_loss", "kl_loss", "kl")
    moved = any(is_other(line[name], line[f"{name}_after"]) for name in names)
    return moved or any(line[name] > 0 for name in ("shifted", "drifted", "versus_l1", "rescaled"))


def is_other(left: float, right: float) -> bool:
    """True if two numbers differ; NaN is the same as NaN."""
    return left != right and not (left != left and right != right)

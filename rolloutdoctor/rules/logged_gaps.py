"""Quantities of which a log has no number in some steps: NaN, infinite, or not logged any more."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.rules.wording import counted

FEWEST_LINES = 5
"""Lines at the end of a log without a quantity from which on it has ended."""

INTERVALS = 3
"""The same in the longest interval at which it was logged before."""

OF_FUNCTIONS = frozenset({"function_reward", "function_reward_std"})
"""Quantities of which a log has one for each reward function, which may have scored no response."""


@dataclass(frozen=True)
class LoggedGap:
    """Steps in which a quantity has no number, though other quantities are logged.

    Attributes:
        metric: name in the log.
        quantity: canonical name.
        first: the first of the steps; where it ended, the last step that has it.
        count: how many there are.
        lines: steps of the log.
        ended: it is logged as a number until `first`, and not at all after it.
    """

    metric: str
    quantity: str
    first: int
    count: int
    lines: int
    ended: bool

    @property
    def words(self) -> str:
        """Say what is missing."""
        if self.ended:
            return f"{self.metric} is not logged after step {self.first}, in the last {counted(self.count, 'step')}"
        return f"{self.metric} is NaN or infinite in {self.count:,} of {counted(self.lines, 'step')}"


def gaps_of(run: RunTables, names: Collection[str]) -> Mapping[str, tuple[LoggedGap, ...]]:
    """Return quantity to its gaps in the training steps of a log.

    A quantity that is logged under two names, as by two releases, ends where both do.

    Args:
        run: the tables of the run.
        names: of its logged metrics.
    """
    quantities = metric_quantities(names)
    # Nearly all that is logged is a quantity: a line takes few bytes.
    named = pl.Enum(sorted({*quantities, *quantities.values()}))
    logged = run.lines(
        "metrics",
        (pl.col("split") == "train") & pl.col("metric").is_in(list(quantities)),
        step=pl.col("step"),
        metric=pl.col("metric").cast(named),
        is_bad=~pl.col("logged").is_finite(),
    )
    if not len(logged):
        return {}
    quantity = pl.col("metric").replace_strict(quantities, return_dtype=named)
    is_own = pl.col("quantity").is_in(list(OF_FUNCTIONS))
    line, last = pl.col("line"), pl.col("line").max()
    lines = logged.select(STEP_KEY[0]).unique().sort("step").with_row_index("line")
    is_bad = pl.col("is_bad")
    table = (
        logged.with_columns(quantity=quantity)
        .join(lines.with_columns(line=pl.col("line").cast(pl.Int64)), on="step")
        .with_columns(key=pl.when(is_own).then("metric").otherwise("quantity"))
        .sort("key", "line", "metric")
        .group_by("key", maintain_order=True)
        .agg(
            pl.col("quantity", "metric").last(),
            last=pl.col("step").max(),
            missing=len(lines) - 1 - last,
            interval=line.diff().max().fill_null(0).clip(1),
            values=line.n_unique(),
            bad=pl.col("line").filter(is_bad).n_unique(),
            first_bad=pl.col("step").filter(is_bad).first(),
        )
    )
    by_quantity: dict[str, tuple[LoggedGap, ...]] = {}
    for row in table.iter_rows(named=True):
        about, gaps = (row["metric"], row["quantity"]), []
        if row["bad"]:
            gaps.append(LoggedGap(*about, row["first_bad"], row["bad"], len(lines), ended=False))
        has_ended = row["missing"] >= max(FEWEST_LINES, INTERVALS * row["interval"])
        if has_ended and row["values"] > 1:
            gaps.append(LoggedGap(*about, row["last"], row["missing"], len(lines), ended=True))
        if gaps:
            by_quantity[row["quantity"]] = (*by_quantity.get(row["quantity"], ()), *gaps)
    return {name: by_quantity[name] for name in BY_NAME if name in by_quantity}

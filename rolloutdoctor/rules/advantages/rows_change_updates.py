"""RDA025: the number of optimizer steps goes by the rows that trajectories give."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class RowsChangeUpdates(TableRule):
    """Batches of equally many trajectories take more optimizer steps where these give more rows.

    ## What it does
    Where rows have a `trajectory_id` and an `optim_step_id`, compares the optimizer steps that generated batches with
    equally many trajectories were cut into.

    ## Why it matters
    A batch size that counts rows cuts a batch of N trajectories into more optimizer steps the more rows they give:
    with longer rollouts, compaction or branches the policy moves further on the same data, at the same learning rate,
    and rows of later updates are further off-policy.

    ## How it is measured
    Trajectories, rows and distinct `optim_step_id` are counted by step, and steps with equally many trajectories are
    compared: `times` is the largest number of updates among them divided by the smallest. A finding requires that in
    every such pair of steps that differ, the one with more updates has more rows. It is a warning from 1.5 times, else
    information; confirmed, since both counts are recorded. Not applicable if no two steps can be compared.

    ## What to do
    Count trajectories, or prompts, in the size of a batch; or scale the learning rate to the updates.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> steps = [{"trajectory_id": [0, 1, 2, 3], "optim_step_id": [0, 0, 1, 1]}]
    >>> steps += [{"trajectory_id": [0, 0, 1, 1, 2, 2, 3, 3], "optim_step_id": [0, 0, 1, 1, 2, 2, 3, 3]}]
    >>> batches = [toy_batch([[1, 0] * (2 + 2 * n)], per_row=each, step=n) for n, each in enumerate(steps)]
    >>> diagnose(batches, trainer=None, select=["RDA025"]).findings[0].measures["times"].value
    2.0
    """

    code = "RDA025"
    name = "rows-change-updates"
    references = (
        "https://github.com/THUDM/slime/issues/2300",
        "https://github.com/THUDM/slime/issues/1918",
    )
    reads = ("trajectory_id", "optim_step_id")
    needs_objective = False
    splits = ("train",)
    needs = ("trajectory_id", "optim_step_id")

    warn_from: float = 1.5

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the numbers of trajectories, rows and updates of each step."""
        updated = rows.filter(pl.col("trajectory_id") >= 0, pl.col("optim_step_id") >= 0)
        return updated.group_by(STEP_KEY, maintain_order=True).agg(
            pl.first("sample_id"),
            trajectories=pl.n_unique("trajectory_id"),
            updates=pl.n_unique("optim_step_id"),
            rows=pl.len(),
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step, beside that of fewest updates among those with as many trajectories."""
        alike, steps = "trajectories", run.rows
        # The rows of steps with so many updates, and whether all are more than those of steps with fewer.
        by_updates = steps.group_by(alike, "updates").agg(low=pl.min("rows"), high=pl.max("rows")).sort("updates")
        goes_by_rows = (pl.col("low") > pl.col("high").shift(1)).fill_null(value=True).all()
        ordered = by_updates.group_by(alike, maintain_order=True).agg(goes_by_rows=goes_by_rows)
        least = steps.with_columns(fewest=pl.min("updates").over(alike), compared=pl.len().over(alike))
        return least.with_columns(times=pl.col("updates") / pl.col("fewest")).join(
            ordered, on=alike, how="left", maintain_order="left"
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """How far the numbers of updates are apart, and what they were made of."""
        return {
            "times": (pl.max("times"), "1"),
            "most_updates": (pl.max("updates"), "updates"),
            "fewest_updates": (pl.min("fewest"), "updates"),
            "rows_per_trajectory": (pl.sum("rows") / pl.sum("trajectories"), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps with most updates."""
        return table.filter(pl.col("times") > 1).with_columns(value="times")

    def note(self, place: Mapping[str, Any]) -> str:
        """What became of the step."""
        return (
            f"{place['trajectories']:,} trajectories in {counted(place['rows'], 'row')}: "
            f"{counted(place['updates'], 'update')}, and {place['fewest']} elsewhere"
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No two steps to compare, or one row for each trajectory."""
        if not len(run.table) or run.table["compared"].max() == 1:
            return "no two steps have equally many trajectories"
        return None if (run.table["rows"] > run.table["trajectories"]).any() else "every trajectory has one row"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where steps differ by half or more."""
        differing = run.table.filter(pl.col("times") > 1)
        times = run["times"]
        if not len(differing) or times is None or not differing["goes_by_rows"].all():
            return None
        worst = differing.sort("times", descending=True, maintain_order=True).row(0, named=True)
        return Judgement(
            severity=Severity.WARNING if times >= self.warn_from else Severity.INFO,
            confirmed=True,
            headline=(
                f"{worst['trajectories']:,} trajectories become {worst['fewest']:,} to {worst['updates']:,} optimizer "
                "steps, by the rows that they give"
            ),
            message=(
                f"steps with equally many trajectories take up to {number(times)} times as many optimizer steps where "
                f"they give more rows ({number(run['rows_per_trajectory'])} for each trajectory on average)"
            ),
            evidence="the run says which trajectory and which optimizer step each row is of",
            advice="count trajectories or prompts in the batch size, or scale the learning rate to the updates",
        )

"""RDA023: a trajectory that gives several rows has several times the weight in the loss."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

ROUNDING = 1e-6
"""Relative difference up to which weights are equal: that of float32 sums."""


class TrajectoryWeight(TableRule):
    """A trajectory that gives several rows has several times the weight of another one in the loss.

    ## What it does
    Where rows have a `trajectory_id` and every row weighs the same in the loss, adds up the weights by trajectory.

    ## Why it matters
    Agents whose context is compacted, branches or is trained turn by turn give several rows for one rollout. In a mean
    over rows a rollout of ten rows moves the policy ten times as much as one of a single row, whatever its reward.
    Trainers differ: slime and miles can average over trajectories, others do not.

    ## How it is measured
    The weight of a row is that of its tokens under the configured aggregation, times their number. `moved_weight` is
    the share of the loss that trajectories have beyond an equal part, averaged over steps; `largest_weight` is the
    largest weight of a trajectory as a multiple of an equal part. It is a warning from 0.1, information from 0.01. If
    rows differ in weight, the loss counts tokens or trajectories, which is another choice: not applicable.

    ## What to do
    Average over trajectories where the trainer can, or divide the loss of a row by the number of rows of its
    trajectory. Keep it if turns are what you train.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 1, 1, 0]], per_row={"trajectory_id": [0, 0, 0, 1]})
    >>> diagnose_one("RDA023", batch, trainer="trl", loss_type="grpo")
    'RDA023 warning exposed: moved_weight 0.25'
    """

    code = "RDA023"
    name = "trajectory-weight"
    references = (
        "https://github.com/THUDM/slime/issues/2300",
        "https://github.com/NovaSky-AI/SkyRL/issues/1529",
        "https://github.com/rllm-org/rllm/issues/512",
    )
    reads = ("trained_tokens", "weight", "trajectory_id")
    splits = ("train",)
    needs_loss = True
    rests_on = ("loss",)

    info_from: float = 0.01
    warn_from: float = 0.1

    def columns(self, context: Context) -> frozenset[str]:
        """The trajectory, and the columns of the loss."""
        loss = frozenset() if context.objective is None else loss_columns(context.objective)
        return loss | {"trajectory_id"}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each trained trajectory; its weight is a share of the step's."""
        mass = pl.col("weight") * pl.col("trained_tokens")
        trajectory = pl.when(pl.col("trajectory_id") >= 0).then("trajectory_id")
        rows = (
            rows.filter(pl.col("trained_tokens") > 0, mass.is_finite(), mass > 0)
            .with_columns(own=mass, trajectory=pl.coalesce(trajectory, -1 - pl.int_range(pl.len())))
            .with_columns(
                is_even=(pl.max("own") - pl.min("own")).over(STEP_KEY) <= ROUNDING * pl.max("own").over(STEP_KEY)
            )
        )
        trajectories = rows.group_by(*STEP_KEY, "trajectory", maintain_order=True).agg(
            pl.first("group_id", "sample_id", "is_even"), pl.sum("own"), rows=pl.len()
        )
        share = pl.col("own") / pl.sum("own").over(STEP_KEY)
        return trajectories.with_columns(times=share * pl.len().over(STEP_KEY))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The trajectories."""
        return run.rows

    def quantities(self) -> Mapping[str, Quantity]:
        """How much of the loss is not where equal parts would have it."""
        return {
            "moved_weight": ((pl.col("times") - 1).abs().mean() / 2, "share"),
            "largest_weight": (pl.max("times"), "1"),
            "most_rows": (pl.max("rows"), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The trajectories of most rows."""
        return table.filter(pl.col("times") > 1 + ROUNDING).with_columns(value="times")

    def note(self, place: Mapping[str, Any]) -> str:
        """Its rows and its weight."""
        return f"{counted(place['rows'], 'row')}, {number(place['times'])} times an equal part of the loss"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No row has a weight."""
        return (
            None if len(run.table) else Missing("no row has a trained token and a weight in the loss", "widen --steps")
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """A loss that counts something else, or one row for each trajectory."""
        if not run.table["is_even"].all():
            return "rows differ in weight: the loss counts tokens or trajectories"
        return None if run.count("most_rows") > 1 else "every trajectory has one row"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where much of the loss is moved; the choice is the trainer's."""
        moved = run["moved_weight"]
        if moved is None or moved < self.info_from or not run.table["is_even"].all():
            return None
        several, times = int((run.table["rows"] > 1).sum()), number(run["largest_weight"])
        return Judgement(
            severity=Severity.WARNING if moved >= self.warn_from else Severity.INFO,
            confirmed=False,
            headline=(
                f"each row of a trajectory counts: one has {times} times an equal part of the loss (contested upstream)"
            ),
            message=(
                f"{several:,} of {len(run.table):,} trajectories have several rows, up to {run.count('most_rows'):,}; "
                f"a mean over rows moves {percent(moved)} of the loss to those with most"
            ),
            evidence="every row has the same weight in the loss, as the options say",
            advice=(
                "average over trajectories, or divide the loss of a row by the number of rows of its trajectory; keep "
                "it if turns are what you train"
            ),
            fix=_fix_of(context),
        )

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """The part that weights rows."""
        return (Part.POLICY_LOSS,)


def _fix_of(context: Context) -> str | None:
    """The fix, where it is about the loss of the run."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    chosen = choose("one-weight-per-trajectory")
    return chosen.label if context.objective is not None and chosen.applies_to(context.objective) else None

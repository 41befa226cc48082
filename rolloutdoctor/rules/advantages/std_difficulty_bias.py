"""RDA012: dividing by the group's standard deviation weighs prompts by difficulty."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part, has_part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.advantages.dead_groups import BINARY
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, scores

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class StdDifficultyBias(TableRule):
    """Dividing by the group's standard deviation lifts very easy and very hard prompts.

    ## What it does
    Adds up the absolute advantages by the number of right responses in a group, with the division by the group's
    standard deviation and without it.

    ## Why it matters
    A group with one right response of eight has a smaller standard deviation than one with four, so dividing by it
    gives very hard and very easy prompts more weight. Here the division gives the former half as much weight again,
    whether its one success was luck or not, so the objective is no longer the mean reward.

    ## How it is measured
    Rewards must be right or wrong (0 and 1, or -1 and 1). `edge_mass_share` is the share of the absolute advantages in
    groups with one right or one wrong response, `edge_mass_share_without_std` the same without the division, and
    `weight_ratio` the largest factor that the division gives a group over the smallest. It is a choice of the
    estimator, so this is information, reported if the share grows by a tenth of itself or more.

    ## What to do
    Nothing, if it is meant. Dr. GRPO leaves the division out; a standard deviation over the batch keeps the scale and
    weighs all prompts alike.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]])
    >>> diagnose_one("RDA012", batch, trainer="trl")
    'RDA012 info exposed: edge_mass_share 0.3981'
    """

    code = "RDA012"
    name = "std-difficulty-bias"
    rests_on = ("advantages",)
    references = (
        "https://arxiv.org/abs/2503.20783",
        "https://github.com/huggingface/trl/issues/3256",
    )
    reads = ("reward", "score", "in_baseline", "advantage")
    adds = ("compared",)
    splits = ("train",)
    part_names = (Part.GROUP_STD,)

    grows_by: float = 1.1

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages, where a group's standard deviation divides."""
        if context.objective is None or not has_part(context.objective, Part.GROUP_STD):
            return frozenset()
        return advantage_columns(context.objective) | {"reward", "group_id"}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The groups as the trainer compares them."""
        if step.rows is None or step.rows.advantage_N is None:
            return dict.fromkeys(self.adds)
        return {"compared": step.compared_N}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each group of two or more: absolute advantages, divided (`mass`) and not (`plain`)."""
        reward, group = scores(context), [*STEP_KEY, "compared"]
        is_finite, right, size, live = reward.is_finite(), pl.col("right"), pl.col("size"), pl.col("is_live")
        return (
            rows.drop_nulls("compared")
            .filter("in_baseline")
            .with_columns(off=(reward - reward.mean().over(group)).abs())
            .group_by(group, maintain_order=True)
            .agg(
                size=pl.len(),
                rows=is_finite.sum(),
                right=(reward == 1).sum(),
                mass=pl.col("advantage").abs().fill_nan(0.0).filter(is_finite).sum(),
                plain=pl.col("off").filter(is_finite).sum(),
                **{f"binary{number}": reward.filter(is_finite).is_in(ends).all() for number, ends in enumerate(BINARY)},
            )
            .filter(size > 1, pl.col("rows") > 0)
            .with_columns(is_binary=pl.any_horizontal(pl.col("^binary.$").all().over(STEP_KEY)))
            .with_columns(is_live=pl.col("is_binary") & (right > 0) & (right < size))
            .with_columns(
                is_edge=live & (size > 2) & ((right == 1) | (right == size - 1)),
                mass=pl.when(live).then("mass"),
                plain=pl.when(live & (pl.col("plain") > 0)).then("plain"),
            )
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The groups, beside how advantages are scaled at their number of right answers, in the run and the step."""
        factor, live = pl.sum("mass") / pl.sum("plain"), pl.col("is_live")
        return run.rows.with_columns(
            factor_in_run=pl.when(live).then(factor.over("right", "size")),
            factor_in_step=pl.when(live).then(factor.over(*STEP_KEY, "right", "size")),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Shares of groups at the edges, with and without the division."""
        mass, plain, edge = pl.col("mass"), pl.col("plain"), pl.col("is_edge")
        factor = pl.when(pl.col("step").n_unique() == 1).then("factor_in_step").otherwise("factor_in_run")
        return {
            "edge_mass_share": (mass.filter(edge).sum() / mass.sum(), "share"),
            "edge_mass_share_without_std": (plain.filter(edge).sum() / plain.sum(), "share"),
            "edge_groups_share": (edge.sum() / pl.sum("is_live"), "share"),
            "weight_ratio": (factor.max() / factor.min(), "1"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No group with a spread."""
        if len(run.table) and (run.table["is_live"].any() or not run.table["is_binary"].all()):
            return None
        return Missing("no group has a spread of rewards", "widen --steps, or record more steps")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Rewards without right and wrong."""
        if run.table["is_binary"].all():
            return None
        return "rewards are not right or wrong, so groups have no pass rate"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: it is a choice."""
        share, plain = run["edge_mass_share"] or 0.0, run["edge_mass_share_without_std"] or 0.0
        if not run.table["is_binary"].all() or not share or share < self.grows_by * plain:
            return None
        least, most = run.table.select(least=pl.min("factor_in_run"), most=pl.max("factor_in_run")).row(0)
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=(
                f"groups with exactly one right or one wrong response carry {percent(share)} of the total "
                f"absolute advantage, and {percent(plain)} if nothing is divided by the std"
            ),
            message=(
                f"{counted(len(run.table.filter('is_edge')), 'group')} have exactly one right or one wrong response; "
                f"dividing by the std scales the advantages of a group by {number(least)} to {number(most)}"
            ),
            evidence="the rewards and the configured estimator; this is a design choice",
            advice="keep it if intended, or do not divide by the std, as in Dr. GRPO",
        )

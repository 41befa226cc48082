"""RDA008: groups whose only signal is a shaping term."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.function_groups import groups_by_function
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, scores, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


def _divides(objective: Objective) -> bool:
    """True if the sum of the reward functions is divided by its group's standard deviation."""
    return objective.advantage.spec.is_standard_score and objective.advantage.scale == "group"


class ShapedRewardPhantom(TableRule):
    """A shaping term is the whole signal of groups that have one outcome.

    ## What it does
    Finds groups whose outcome (a reward function of 0 and 1) is the same for all rows while their total reward varies,
    where rewards are divided by the group's standard deviation.

    ## Why it matters
    In a group where every response fails, only a small reward for format or length varies, and it decides the whole
    update. Divided by its own standard deviation it gets advantages as large as those of a group of failures and
    successes, whatever its weight: the policy learns to shape, with full force, on the prompts that it cannot solve.
    Measured upstream: exact match of 0.10 with the term, 0.75 where groups were filtered by their outcome.

    ## How it is measured
    The outcome is the only function that is exactly 0 or 1 in every row of the run, beside another one that varies;
    with none or several, the rule cannot tell. `advantage_mass_share` is these groups' share of the absolute advantage,
    logged or else recomputed. `length_correlation` correlates advantage and response length within them: above 0, they
    teach the policy to write more. Spreads at the level of rounding do not count. Dense rewards without an outcome have
    no such groups. It is a warning if groups in which every response fails have a quarter of the absolute advantage,
    confirmed by logged advantages, and else information: some shaping is intended, and among successes it chooses
    between right responses.

    ## What to do
    Leave out groups without variance in the outcome, give the term to successes only, or do not divide such groups.

    ## Example
    >>> from dataclasses import replace
    >>> import torch
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> correct, brief = [0.0, 0.0, 1.0, 0.0], [0.1, 0.0, 0.0, 0.0]
    >>> rewards = {"correct": torch.tensor(correct).double(), "brief": torch.tensor(brief).double()}
    >>> batch = replace(toy_batch([[0.1, 0.0], [1.0, 0.0]]), rewards=rewards)
    >>> diagnose_one("RDA008", batch, trainer="trl")
    'RDA008 warning exposed: groups 1'
    """

    code = "RDA008"
    name = "shaped-reward-phantom"
    rests_on = ("advantages",)
    references = ("https://github.com/verl-project/verl-recipe/issues/125",)
    reads = ("reward", "score", "in_baseline", "advantage", "tokens", "rewards")
    adds = ("compared", "logged")
    splits = ("train",)
    part_names = (Part.GROUP_STD,)
    uses = ("advantage", "advantages", "response_mask")
    """Logged advantages are better than recomputed ones."""

    warn_above: float = 0.25
    """Share of the absolute advantage from which on shaping is no side term of the update."""

    def columns(self, context: Context) -> frozenset[str]:
        """Rewards by function and what the advantages need, where a group's standard deviation divides."""
        if context.objective is None or not _divides(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"rewards"}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The groups as the trainer compares them, and what was logged of their advantages."""
        rows = step.rows
        if rows is None or rows.advantage_N is None or not step.batch.rewards or not _divides(rows.objective):
            return dict.fromkeys(self.adds)
        return {"compared": step.compared_N, "logged": step.logged_advantages()}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over the groups for each function, and the shaped ones: it varies in none, the reward does."""
        groups = groups_by_function(rows, scores(context))
        is_shaped, is_failed, mass = pl.col("is_shaped"), pl.col("is_shaped") & pl.col("is_failed"), pl.col("mass")
        sums = groups.group_by(*STEP_KEY, "function", maintain_order=True).agg(
            pl.sum("mass"),
            pl.col("is_binary", "is_logged").all(),
            pl.min("low"),
            pl.max("high"),
            groups=(pl.col("size") > 1).sum(),
            shaped=is_shaped.sum(),
            failed=is_failed.sum(),
            shaped_mass=mass.filter(is_shaped).sum(),
            failed_mass=mass.filter(is_failed).sum(),
            **{name: pl.col(name).filter(is_shaped).sum() for name in ("squares", "lengths", "products")},
        )
        names = [*NAMES, "function", "lowest", "highest"]
        places = groups.filter("is_shaped", "is_grouped").select(*names, outcome="value", value="mass")
        return with_places(sums, places, context, "function")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Say which function is the outcome, in the run and in each step."""
        lines, function, varies = run.rows, pl.col("function"), pl.col("high").max() > pl.col("low").min()
        for among, keys in (("run", ["split"]), ("step", STEP_KEY)):
            binary = pl.col(f"binary_in_{among}")
            lines = lines.with_columns(
                pl.col("is_binary").all().over(*keys, "function").alias(f"binary_in_{among}"),
                varies=varies.over(*keys, "function"),
            ).with_columns(
                # The only one of these, if another function varies.
                (
                    binary
                    & (function.filter(binary).n_unique() == 1).over(keys)
                    & (pl.col("varies") & ~binary).any().over(keys)
                ).alias(f"outcome_in_{among}")
            )
        return lines

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of groups, and their share of the log-prob gradient."""
        of_step = pl.col("step").n_unique() == 1
        outcome = pl.when(of_step).then("outcome_in_step").otherwise("outcome_in_run")
        names = ("shaped", "groups", "failed", "shaped_mass", "mass", "squares", "lengths", "products")
        shaped, groups, failed, mass, total_mass, squares, lengths, products = (
            pl.col(name).filter(outcome).sum() for name in names
        )
        when_known = pl.when(outcome.any())
        return {
            "groups": (when_known.then(shaped), "groups"),
            "groups_share": (when_known.then(shaped / groups), "share"),
            "failed_groups": (when_known.then(failed), "groups"),
            "advantage_mass_share": (mass / total_mass, "share"),
            "length_correlation": (products / (squares.sqrt() * lengths.sqrt()), "1"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The groups with the largest advantages, of steps that are compared by group."""
        return table.filter("outcome_in_step").drop_nulls("value")

    def note(self, place: Mapping[str, Any]) -> str:
        """The outcome, and the range of the rewards."""
        return (
            f"{place['function']} is {place['outcome']:.3g} in every row, rewards range from {place['lowest']:.4g} to "
            f"{place['highest']:.4g}"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No function is the outcome, or several could be."""
        if run["groups"] is not None or not self.columns(context):
            return None
        outcomes = sorted(run.table.filter("binary_in_run")["function"].unique())
        remedy = "log the outcome as a reward function of its own, 0 or 1, beside the shaping terms"
        if len(outcomes) > 1:
            return Missing(f"several reward functions could be the outcome: {', '.join(outcomes)}", remedy)
        if outcomes:
            return Missing(f"no reward function varies beside {outcomes[0]}", remedy)
        return Missing("no reward function is 0 or 1 in every row, so none is the outcome", remedy)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning from a quarter of the absolute advantage in groups of failures on, else information."""
        of_outcome = run.table.filter("outcome_in_run")
        shaped, all_groups, mass, failed, total = of_outcome.select(
            pl.sum("shaped", "groups", "shaped_mass", "failed_mass", "mass")
        ).row(0)
        if not mass:
            return None
        name, groups = of_outcome["function"][0], counted(shaped, "group")
        share, slope = percent(run["advantage_mass_share"]), run["length_correlation"]
        direction = "" if slope is None else f"; longer responses {'gain' if slope > 0 else 'lose'} there"
        return Judgement(
            severity=Severity.WARNING if failed >= self.warn_above * total else Severity.INFO,
            confirmed=bool(of_outcome["is_logged"].all()),
            headline=(
                f"in {groups} all responses have the same {name}; the other rewards alone make {share} of the "
                "total absolute advantage"
            ),
            message=(
                f"in {groups} of {all_groups:,} all responses have the same {name} "
                f"({run.count('failed_groups'):,} with 0) but different rewards: shaping terms alone make {share} of "
                f"the total absolute advantage{direction}"
            ),
            evidence="the rewards of the rows, by function"
            if slope is None
            else f"advantage and response length have a correlation of {number(slope)} within these groups",
            advice="drop groups in which the outcome does not vary, or give shaping rewards to correct responses only",
        )

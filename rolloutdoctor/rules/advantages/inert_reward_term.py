"""RDA009: reward functions that cancel in the baseline."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


def _has_group_baseline(objective: Objective) -> bool:
    """True if what the rows of a group have in common cancels."""
    rule = objective.advantage
    return rule.spec.has_groups and rule.spec.baseline == "mean"


class InertRewardTerm(TableRule):
    """A reward function is the same for all responses to a prompt, so it cancels out.

    ## What it does
    Finds reward functions that are constant within every group and differ between groups, and names those that never
    vary in the whole run.

    ## Why it matters
    The group baseline removes whatever all rows of a group have in common, so this reward term trains nothing. A term
    that depends on the prompt alone, or on the group as a whole (a penalty for low diversity, a bonus for hard
    prompts), moves the reward metric and never the policy.

    ## How it is measured
    A function varies within a group if max - min is above 0, or if some rows have it and others do not (null).
    `inert_variance_share` is the inert functions' share of the squared deviations of all functions from their means
    over the step; `reward_variance_share` is the share of the reward's variance that lies within groups, which is all
    that can reach the gradient. A function that depends on the response may agree in every group by chance; the finding
    requires a probability of at most 2^-20 for that. Each group of n rows contributes a factor of 2 / (n + 1), at most
    1/2 (for a success probability uniform between 0 and 1), so 20 pairs are enough, or ten groups of eight. From 2^-8
    it is information that says how likely chance is. Beyond 2^-20 it is a warning if the inert functions have a tenth
    of the variance or more and others vary within groups, and else information. Functions of weight 0 are left out. Not
    tested are estimators without a group baseline, pass@k, steps that are compared as one batch, where the term does
    not cancel, and a single group.

    ## What to do
    Make the term depend on the response, apply it after the baseline, or drop it.

    ## Example
    >>> from dataclasses import replace
    >>> import torch
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> correct, hard = torch.tensor([1.0, 0.0] * 20), torch.arange(40).div(2, rounding_mode="floor").double()
    >>> batch = toy_batch([[1 + g, g] for g in range(20)])
    >>> diagnose_one("RDA009", replace(batch, rewards={"correct": correct.double(), "hard": hard}), trainer="trl")
    'RDA009 warning exposed: inert_functions 1'
    """

    code = "RDA009"
    name = "inert-reward-term"
    references = ("https://github.com/huggingface/trl/issues/3857",)
    reads = ("reward", "rewards")
    adds = ("compared",)
    splits = ("train",)
    part_names = (Part.GROUP_BASELINE,)

    least_bits: float = 20.0
    """Once in a million runs."""

    some_bits: float = 8.0
    """Once in 256 runs, which the report says."""

    warn_above: float = 0.1
    """Below a tenth of what the functions vary by, what cancels is small beside what does not."""

    def columns(self, context: Context) -> frozenset[str]:
        """Rewards by function and groups, where there is a group baseline."""
        if context.objective is None or not _has_group_baseline(context.objective):
            return frozenset()
        return frozenset({"group_id", "reward", "rewards"})

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The groups as the trainer compares them."""
        evaluation = step.evaluation
        if evaluation is None or not _has_group_baseline(evaluation.objective) or not step.batch.rewards:
            return dict.fromkeys(self.adds)
        return {"compared": step.compared_N}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return one line for each step and reward function, with what the groups of the step are; see `_functions`."""
        compared, size = [*STEP_KEY, "compared"], pl.col("size")
        is_one = (pl.n_unique("compared") < 2) & (pl.n_unique("group") > 1)
        rows = rows.drop_nulls("compared").filter(~is_one.over(STEP_KEY)).with_columns(size=pl.len().over(compared))
        # How unlikely it is that the rows of a group agree by chance.
        bits = ((size + 1) / 2).log(2).clip(1) * (size > 1)
        reward = _finite("reward") - _finite("reward").min().over(compared)
        steps = (
            rows.with_columns(within=(reward - reward.mean().over(compared)) ** 2)
            .group_by(STEP_KEY, maintain_order=True)
            .agg(
                groups=pl.col("compared").filter(size > 1).n_unique(),
                bits=bits.filter(pl.struct("compared").is_first_distinct()).sum(),
                within=pl.sum("within"),
                total=((_finite("reward") - _finite("reward").mean()) ** 2).sum(),
            )
        )
        functions = self._functions(rows, context)
        return steps.join(functions, on=STEP_KEY, how="left", maintain_order="left_right").with_columns(
            is_first=pl.int_range(pl.len()).over(STEP_KEY) == 0
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Add which functions are inert, and constant, in the run and in each step."""
        table = run.rows
        varies, differs = pl.col("varies").any(), pl.col("high").max() > pl.col("low").min()
        for among, keys in (("run", ["function"]), ("step", ["function", *STEP_KEY])):
            table = table.with_columns(
                (~varies & differs & (pl.sum("groups") > 0)).over(keys).alias(f"inert_in_{among}"),
                (~varies & ~differs).over(keys).alias(f"constant_in_{among}"),
            )
        return table

    def _functions(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each step and function: its range, squared deviations, and whether it varies in a group."""
        names, objective = [name for name in rows.columns if name.startswith("rewards/")], context.objective
        weights = () if objective is None else objective.reward_weights or objective.advantage.reward_weights
        if len(weights) == len(names):
            names = [name for name, weight in zip(names, weights, strict=True) if weight]
        value = _finite("value")
        is_partial = (value.count() > 0) & (value.count() < pl.len())
        varies = ((value.max() > value.min()) | is_partial).over(*STEP_KEY, "compared", "function")
        return (
            rows.unpivot(names, index=[*STEP_KEY, "compared"], variable_name="function")
            .with_columns(pl.col("function").str.strip_prefix("rewards/"), pl.col("value").cast(pl.Float64))
            .with_columns(varies=varies)
            .group_by(*STEP_KEY, "function", maintain_order=True)
            .agg(
                pl.col("varies").any(),
                low=value.min(),
                high=value.max(),
                squares=((value - value.mean()) ** 2).sum(),
            )
            .drop_nulls("low")
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of reward functions that cancel, and their share of the reward."""
        function, squares, of_step = pl.col("function"), pl.col("squares"), pl.col("step").n_unique() == 1
        inert = pl.when(of_step).then("inert_in_step").otherwise("inert_in_run")
        constant = pl.when(of_step).then("constant_in_step").otherwise("constant_in_run")
        within, total, groups = (pl.col(name).filter("is_first").sum() for name in ("within", "total", "groups"))
        return {
            "inert_functions": (function.filter(inert).n_unique(), "functions"),
            "constant_functions": (function.filter(constant).n_unique(), "functions"),
            "inert_variance_share": (squares.filter(inert).sum() / squares.sum(), "share"),
            "reward_variance_share": (pl.min_horizontal(within, total) / total, "share"),
            "groups": (groups, "groups"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few groups of two or more rows."""
        bits = self._bits(run)
        if bits >= self.least_bits or not self.columns(context):
            return None
        if self.judge(run, context) is not None:
            return None
        return Missing(
            f"{counted(run.count('groups'), 'group')} of two or more rows with rewards by function, which agree by "
            f"chance once in 2^{bits:.0f} runs; needs 2^{self.least_bits:g}",
            "widen --steps, or record the column rewards for every row",
        )

    def _bits(self, run: Measured) -> float:
        """How unlikely it is that the rows of every group agree by chance."""
        return float(run.table.filter("is_first")["bits"].sum())

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where much of what the functions vary by cancels in enough groups, else information."""
        functions = (
            run.table.drop_nulls("function")
            .group_by("function")
            .agg(pl.first("inert_in_run", "constant_in_run"), pl.min("low"))
            .sort("function")
        )
        inert = functions.filter("inert_in_run")["function"].to_list()
        constant = functions.filter("constant_in_run").select("function", "low").rows()
        if not inert and not constant:
            return None
        share = run["inert_variance_share"]
        # No group has any variance: dead groups, and not one term.
        alone = len(inert) + len(constant) == len(functions)
        bits, groups = self._bits(run), counted(run.count("groups"), "group")
        few = bits < self.least_bits
        if few and (alone or bits < self.some_bits):
            return None
        heavy = bool(inert) and share is not None and share >= self.warn_above and not alone and not few
        named = [*inert, *(name for name, _ in constant)]
        parts = []
        if inert:
            parts.append(f"{', '.join(inert)}: constant within each of {groups}")
        if constant:
            parts.append(f"{', '.join(f'{name} = {low:.4g}' for name, low in constant)} in every row")
        return Judgement(
            severity=Severity.WARNING if heavy else Severity.INFO,
            confirmed=False,
            headline=f"{' and '.join(named)} {'cancel' if len(named) > 1 else 'cancels'} in the group baseline "
            + (f"of all {groups} " if few else "")
            + f"({percent(share)} of the functions' variance)",
            message="; ".join(parts),
            evidence=(
                f"{percent(run['reward_variance_share'])} of the variance of the reward is within groups and can "
                "reach the gradient" + (f"; so few groups agree by chance once in 2^{bits:.0f} runs" if few else "")
            ),
            advice="make the term depend on the response, add it after the baseline is subtracted, or drop it",
        )


def _finite(name: str) -> pl.Expr:
    """A column where it is finite."""
    return pl.when(pl.col(name).is_finite()).then(pl.col(name))

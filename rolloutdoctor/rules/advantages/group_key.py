"""RDA022: groups that hold the responses of one rollout, though the prompt was sampled several times."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns, prompt_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, baseline_per_token, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class GroupKey(TableRule):
    """Groups hold one rollout each, although their prompt was sampled several times in the step.

    ## What it does
    Looks for groups whose rows are all of one rollout (one row, or the rows of one `trajectory_id`), and whose prompt
    (the `task_id`, where the run has it) is also that of other such groups of the step.

    ## Why it matters
    A group baseline compares the rollouts of one prompt. Where the group id is that of a trajectory, an agent or a
    turn, there is nothing to compare with: the advantage is the raw reward, or 0 for all rows of the rollout.

    ## How it is measured
    The prompt of a rollout is that of its first row. `split_share` is the share of groups whose prompt has other
    one-rollout groups in the same step; a finding requires eight such groups and half of all groups. Prompts that are
    drawn twice as groups of several rollouts do not count. Confirmed: the logged advantages of these rows equal the
    recomputed ones; if none does, the trainer compared other rows, and there is no finding. Environments that give one
    prompt to different tasks look the same; there, too, a group of one rollout has no baseline.

    ## What to do
    Give the advantage computation the id of the task (the prompt's uid), not that of the rollout, agent or turn.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1], [0], [1], [0]] * 4, per_row={"prompt_ids": [7, 7, 8, 8] * 4})
    >>> diagnose_one("RDA022", batch, trainer="verl", adv_estimator="grpo")
    'RDA022 warning exposed: split_share 1'
    """

    code = "RDA022"
    name = "group-key"
    references = (
        "https://github.com/rllm-org/rllm/issues/605",
        "https://github.com/rllm-org/rllm/issues/667",
        "https://github.com/rllm-org/rllm/issues/776",
        "https://github.com/PeterGriffinJin/Search-R1/issues/88",
    )
    reads = ("prompt", "task", "advantage", "trajectory_id")
    adds = ("logged", "radius")
    splits = ("train",)
    stages = ("advantages",)
    part_names = (Part.GROUP_BASELINE,)

    fewest: int = 8
    """Groups: fewer may be prompts that the data hold twice."""

    share_from: float = 0.5

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Which rows are of one rollout, what advantages are made of, and those that were logged."""
        advantages = frozenset() if context.objective is None else advantage_columns(context.objective)
        of_rows = {"task_id", "trajectory_id", "advantage", "advantages"}
        return advantages | prompt_columns(context.columns) | of_rows

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says which rows answer one prompt, or a baseline of another kind."""
        if prompt_columns(context.columns) or "task_id" in context.columns:
            return baseline_per_token(context)
        return Missing("missing column prompt_ids or prompt", context.to_record("prompt_ids"))

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Which group a row is of, what was logged of its advantage, and how far rounding takes that."""
        if step.rows is None or step.rows.advantage_N is None:
            return dict.fromkeys(self.adds)
        logged_N = step.logged_advantages()
        return {"logged": logged_N, "radius": None if logged_N is None else step.advantage_radius()}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each group whose prompt is known."""
        rollout = pl.coalesce("trajectory_id", -1 - pl.int_range(pl.len()))
        prompt = pl.when(pl.col("task") != 0).then("task").otherwise(pl.col("prompt").fill_null(0))
        agrees = (pl.col("logged") - pl.col("advantage")).abs() <= pl.col("radius")
        is_told = pl.col("logged").is_not_nan() & pl.col("advantage").is_not_nan()
        groups = (
            rows.with_columns(rollout=rollout, task=prompt.first().over(*STEP_KEY, rollout))
            .group_by(*STEP_KEY, "group", maintain_order=True)
            .agg(
                pl.first("group_id", "sample_id", "task"),
                is_alone=pl.n_unique("rollout") == 1,
                told=is_told.sum(),
                agreeing=(agrees & is_told).sum(),
            )
            .filter(pl.col("task") != 0)
        )
        alone = pl.col("is_alone").sum().over(*STEP_KEY, "task")
        return groups.with_columns(rollouts=alone, is_split=pl.col("is_alone") & (alone > 1))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The groups."""
        return run.rows

    def quantities(self) -> Mapping[str, Quantity]:
        """Count such groups, and the prompts that they share."""
        split = pl.col("is_split")
        return {
            "split_share": (split.mean(), "share"),
            "split_groups": (split.sum(), "groups"),
            "split_prompts": (pl.struct(*STEP_KEY, "task").filter(split).n_unique(), "prompts"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Groups of the prompts that were sampled most often."""
        return table.filter("is_split").with_columns(value="rollouts")

    def note(self, place: Mapping[str, Any]) -> str:
        """How many rollouts the prompt has."""
        return f"alone in its group, and its prompt has {place['rollouts']} rollouts in the step"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """The trainer compared other rows than those of a group."""
        told, agreeing = (int(run.table[name].sum()) for name in ("told", "agreeing"))
        if told and not agreeing:
            return Missing("the logged advantages are not those of these groups", "record the trainer's own group ids")
        return None

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No prompt was sampled twice in a step."""
        return None if (run.table["rollouts"] > 1).any() or not run.table["is_alone"].all() else "no prompt recurs"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning."""
        groups, share = run.count("split_groups"), run["split_share"]
        if groups < self.fewest or share is None or share < self.share_from:
            return None
        told, agreeing = (int(run.table.filter("is_split")[name].sum()) for name in ("told", "agreeing"))
        prompts = counted(run.count("split_prompts"), "prompt")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=told == agreeing > 0,
            headline=(
                f"{groups:,} groups hold one rollout each, although they share {prompts}: the group id is not the "
                "prompt's"
            ),
            message=(
                f"{groups:,} of {counted(len(run.table), 'group')} ({percent(share)}) hold one rollout, and their "
                f"{prompts} were sampled {groups:,} times: without a sibling to compare with, the advantage is the raw "
                "reward or 0"
            ),
            evidence=(
                f"the logged advantages of {agreeing:,} of {counted(told, 'such row')} equal those of these groups"
                if told
                else "no logged advantages to compare with"
            ),
            advice=(
                "pass the id of the task (the prompt's uid) as the group id, not that of the rollout, the agent or the "
                "turn"
            ),
            fix="group-by-task" if "task_id" in context.columns else None,
        )

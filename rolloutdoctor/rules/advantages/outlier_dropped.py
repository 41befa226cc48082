"""RDA020: dynamic sampling that drops the one response of a group that differs."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Setting, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

FILTER, LEAVE_ONE_OUT, SIZE = "use_dynamic_sampling", "use_leave_one_out_baseline", "num_generations_per_prompt"
"""Options, by their last part: rows without a spread are dropped; the spread is that of the others; rows of a group."""


class OutlierDropped(TableRule):
    """Dynamic sampling dropped the one response of a group that differs from all others.

    ## What it does
    Looks for groups that lack one response and whose others all have the same reward, in runs with dynamic sampling by
    the spread of the other responses.

    ## Why it matters
    Dynamic sampling is meant to drop groups in which nothing can be learned. Where a response is judged by the standard
    deviation of the *others* (a leave-one-out baseline), it drops single responses: in a group of one right and seven
    wrong ones the others of the right one are all equal, so it goes, and the seven wrong ones stay. Advantages are
    computed from what is left, where they are 0: the prompts with the largest advantages train nothing, and their other
    responses fill up the batch in place of groups with a spread.

    ## How it is measured
    A group that has one response fewer than `num_generations_per_prompt` and no spread of rewards (max - min = 0) can
    have passed the filter only if the missing response differed: with equal rewards all would have been dropped, and
    with two different ones none. The last group of a step is left out, because the batch is cut there. Confirmed: the
    rewards show it. `rows_share` is the share of such rows in the batch. Groups of two lose both rows and leave no
    trace.

    ## What to do
    Set `use_leave_one_out_baseline=false` for the filter, or filter by group: drop it where max - min is 0.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> options = {"grpo.use_dynamic_sampling": True, "grpo.use_leave_one_out_baseline": True}
    >>> batch = toy_batch([[0, 0, 0], [1, 0, 1, 0], [1, 1, 1], [1, 1, 0, 0]])
    >>> diagnose_one("RDA020", batch, trainer="nemo-rl", **options, **{"grpo.num_generations_per_prompt": 4})
    'RDA020 warning confirmed: groups_share 0.6667'
    """

    code = "RDA020"
    name = "outlier-dropped"
    references = ("https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/algorithms/grpo.py",)
    reads = ("reward",)
    needs_objective = False
    splits = ("train",)
    needs = ("reward", "group_id")

    def inapplicable_reason(self, context: Context) -> str | None:
        """No filter goes by the spread of the others."""
        on = [_option(context, name) for name in (FILTER, LEAVE_ONE_OUT)]
        if context.trainer is not None and None in on:
            return "the trainer has no filter by the spread of the other responses"
        is_off = any(setting is not None and setting.is_stated and not setting.value for setting in on)
        return "the options leave the filter or its leave-one-out deviation off" if is_off else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Nothing says whether there is such a filter."""
        if context.objective is None:
            return Missing("nothing says which trainer made the run, and with which options", context.unstated)
        needed = {name: _option(context, name) for name in (FILTER, LEAVE_ONE_OUT, SIZE)}
        unknown = [
            name
            for name, setting in needed.items()
            if setting is None or not (setting.is_stated or name == LEAVE_ONE_OUT)
        ]
        if not unknown:
            return None
        return Missing(f"the options do not state {unknown[0]}", "pass the run's configuration with --trainer-config")

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each group but the last of its step; `lost` if its one other response was dropped."""
        size, reward = _option(context, SIZE), pl.col("reward")
        full_size = size.value if size is not None and isinstance(size.value, int) else None
        groups = (
            rows.group_by(*STEP_KEY, "group", maintain_order=True)
            .agg(
                pl.first("group_id", "sample_id"),
                pl.max("row"),
                rows=pl.len().cast(pl.Int64),
                equal=reward.is_finite().all() & (reward.max() == reward.min()),
                reward=reward.first(),
            )
            .filter(pl.col("row") < pl.col("row").max().over(STEP_KEY))
        )
        return groups.with_columns(lost=pl.col("equal") & (pl.col("rows") == pl.lit(full_size, pl.Int64) - 1))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The groups."""
        return run.rows

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the groups that lost a response, and the rows that are left of them."""
        lost, rows = pl.col("lost"), pl.col("rows")
        return {
            "groups_share": (lost.mean(), "share"),
            "groups": (lost.sum(), "groups"),
            "rows": (rows.filter(lost).sum(), "rows"),
            "rows_share": (rows.filter(lost).sum() / rows.sum(), "share"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Such groups."""
        return table.filter("lost").with_columns(value="rows")

    def note(self, place: Mapping[str, Any]) -> str:
        """What is left."""
        return f"{place['rows']} rewards of {number(place['reward'])}, and one is missing"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning."""
        if not run["groups"]:
            return None
        groups = counted(run.count("groups"), "group")
        rows = f"{counted(run.count('rows'), 'row')} ({percent(run['rows_share'])})"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"in {groups} of {len(run.table):,} dynamic sampling dropped the only response that differed; "
            f"{rows} remain, with an advantage of 0",
            message=f"{groups} lack one response, and all others have the same reward: dynamic sampling dropped the "
            f"one that differed, because its others have no spread. {rows} of the batch are left of these groups and "
            "have an advantage of 0",
            evidence="the rewards of the rows; a whole group of equal rewards would have been dropped",
            advice=f"set {LEAVE_ONE_OUT}=false for the filter, or drop whole groups where max - min is 0",
        )


def _option(context: Context, name: str) -> Setting | None:
    """The setting of an option, by the last part of its name."""
    settings = {} if context.config is None else context.config.settings
    # The shortest: options of an estimator have the same last part.
    option = min((full for full in settings if full.rpartition(".")[2] == name), key=len, default=None)
    return None if option is None else settings[option]

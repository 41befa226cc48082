"""RDA011: groups in which every response got the same reward."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import FAILED, TRUNCATED
from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.group_ends import ENDED, ends_of_groups, told_of_groups
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

BINARY = ((0.0, 1.0), (-1.0, 1.0))
"""Values that a reward of right and wrong has."""


class DeadGroups(TableRule):
    """Groups whose responses all got the same reward have no policy gradient.

    ## What it does
    Counts groups without a spread of rewards, at the lower end of the reward, at the upper end, and elsewhere, and the
    trained tokens that they take. Where rows have a status, an error or turns, it counts those in which every response
    failed, was truncated, had a tool call that failed, or called no tool although others of the run do.

    ## Why it matters
    With equal rewards every advantage is 0: the responses were sampled and scored for nothing. Under a token mean they
    stay in the denominator, and the gradient of the other groups is diluted by `kappa`.

    ## How it is measured
    Rewards are compared exactly, since the standard deviation of equal values need not be 0. `kappa` is the share of
    trained tokens in groups with a spread, the factor by which a token mean shrinks the gradient. `expected_share` is
    the share to expect of right-or-wrong rewards if every response is right with the run's mean probability p, p^G + (1
    - p)^G; it is higher if prompts differ in difficulty or responses repeat each other (`RDI009`). `always_dead_share`
    is the share of recurring prompts that were dead in each of their steps. Such groups are a property of the task and
    the policy, so this is information; a warning if every response failed in half of all groups, eight or more; an
    error if no group has a spread, eight or more. If the trainer logs a share under its own definition (TRL:
    frac_reward_zero_std, by the standard deviation that divides, which may be the batch's), it is given beside the
    share of dead groups where the two differ.

    ## What to do
    Sample other prompts, larger groups, or until there is a spread (dynamic sampling); leave out prompts that are
    always dead. If no group of the run has a spread, look at the rewards of one prompt: from eight such groups on that
    is an error, since nothing trains the policy towards the reward.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA011", toy_batch([[1, 0], [1, 1], [0, 0], [0, 1]]), trainer=None)
    'RDA011 info confirmed: dead_share 0.5'
    """

    code = "RDA011"
    name = "dead-groups"
    references = (
        "https://github.com/huggingface/trl/pull/3502",
        "https://github.com/huggingface/trl/issues/6365",
        "https://arxiv.org/abs/2503.14476",
    )
    reads = ("reward", "trained_tokens", "prompt")
    needs_objective = False
    splits = ("train",)
    needs = ("reward", "group_id")
    adds = ("calls", "failed_calls")
    optional = tuple(f"{how}_groups" for how in ENDED)

    fewest: int = 8
    """Groups without a spread that are too many for chance, where there are no others."""

    failing_from: float = 0.5
    """Share of groups of failures from which on that is no property of the task, but of what it runs on."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Trained tokens, how responses ended, and which prompts recur."""
        return frozenset({"response_mask", "status", "error", "turns"}) | prompt_columns(context.columns)

    def metrics(self, context: Context) -> frozenset[str]:
        """The share that the trainer logs."""
        name = _logged_name(context)
        return frozenset() if name is None else frozenset({name})

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Calls of tools in each row whose turns are given, and those that failed."""
        from rolloutdoctor.rules.measures.given_turns import calls_of_rows

        return dict(zip(self.adds, calls_of_rows(step.turns), strict=True))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each group of two or more scored responses."""
        reward, dead = pl.col("reward"), pl.col("low") == pl.col("high")
        # For polars NaN is above every number.
        calls, failed_calls = (pl.col(name).fill_nan(None) for name in self.adds)
        status, has_error = pl.col("status").str.to_lowercase(), pl.col("error").fill_null("") != ""
        return (
            rows.filter(reward.is_finite())
            .group_by(*STEP_KEY, "group", maintain_order=True)
            .agg(
                pl.first("group_id", "sample_id", "prompt"),
                pl.sum("trained_tokens"),
                rows=pl.len(),
                low=reward.min(),
                high=reward.max(),
                right=(reward == 1).sum(),
                failed=(status.is_in(FAILED).fill_null(value=False) | has_error).all(),
                truncated=status.is_in(TRUNCATED).fill_null(value=False).all(),
                has_status=(status.is_not_null() | has_error).any(),
                tool_failed=(failed_calls > 0).fill_null(value=False).all(),
                uncalled=(calls == 0).fill_null(value=False).all(),
                calls=calls.sum(),
                **{f"binary{number}": reward.is_in(ends).all() for number, ends in enumerate(BINARY)},
            )
            .filter(pl.col("rows") > 1)
            .with_columns(pl.col("^binary.$").all().over(STEP_KEY), dead=dead)
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The groups, beside those of their step and of their prompt in other steps."""
        dead = pl.col("dead")
        low, high = pl.col("low").min().over(STEP_KEY), pl.col("high").max().over(STEP_KEY)
        lowest = pl.when("binary0").then(0.0).when("binary1").then(-1.0).otherwise(low)
        highest = pl.when("binary0").then(1.0).when("binary1").then(1.0).otherwise(high)
        is_known = pl.col("prompt") != 0
        logged = run.metrics.select(*STEP_KEY, "logged")
        # Joined by itself, so that the groups of a long run are in memory once.
        steps = run.rows.select(STEP_KEY).join(logged, on=STEP_KEY, how="left", maintain_order="left")
        return run.rows.with_columns(
            steps["logged"],
            lowest=dead & (pl.col("low") == lowest) & (lowest < highest),
            highest=dead & (pl.col("high") == highest) & (lowest < highest),
            recurs=is_known & (pl.col("step").n_unique().over("prompt") > 1),
            always=pl.col("dead").all().over("prompt"),
            is_first=pl.int_range(pl.len()).over(STEP_KEY) == 0,
            own=pl.col("dead").mean().over(STEP_KEY),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of zero-variance groups, and what they cost."""
        dead, prompt, calls = pl.col("dead"), pl.col("prompt"), pl.sum("calls") > 0
        is_known = {how: pl.col("has_status").any() for how in ENDED} | dict.fromkeys(
            ("tool_failed", "uncalled"), calls
        )
        right = pl.sum("right") / pl.sum("rows")
        by_chance = (right ** pl.col("rows") + (1 - right) ** pl.col("rows")).mean()
        return {
            "dead_share": (dead.mean(), "share"),
            "dead_groups": (dead.sum(), "groups"),
            "lowest_groups": (pl.sum("lowest"), "groups"),
            "highest_groups": (pl.sum("highest"), "groups"),
            **{f"{how}_groups": (pl.when(is_known[how]).then((dead & pl.col(how)).sum()), "groups") for how in ENDED},
            "other_groups": (dead.sum() - pl.sum("lowest") - pl.sum("highest"), "groups"),
            "expected_share": (pl.when((pl.col("binary0") | pl.col("binary1")).all()).then(by_chance), "share"),
            "kappa": (pl.col("trained_tokens").filter(~dead).sum() / pl.sum("trained_tokens"), "1"),
            "groups_per_live_group": (pl.len() / (~dead).sum(), "groups"),
            "always_dead_share": (
                prompt.filter(pl.col("recurs") & pl.col("always")).n_unique() / prompt.filter("recurs").n_unique(),
                "share",
            ),
            "logged_share": (pl.col("logged").filter("is_first").mean(), "share"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Dead groups, largest first."""
        return table.filter("dead").with_columns(value="rows")

    def note(self, place: Mapping[str, Any]) -> str:
        """Their reward."""
        return f"{place['rows']} rewards of {number(place['low'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No group of two scored rows."""
        if len(run.table):
            return None
        return Missing("no group has two rows with a reward", "widen --steps, or record whole groups")

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information, as the task and the policy make them; an error where there is no other group."""
        table, dead, groups = run.table, run.count("dead_groups"), len(run.table)
        if not dead:
            return None
        ends, advice = ends_of_groups(run)
        failed = run["failed_groups"] or 0
        fails = failed >= self.fewest and failed >= self.failing_from * groups
        if dead == groups >= self.fewest:
            severity, responses = Severity.ERROR, counted(int(table["rows"].sum()), "response")
            headline = (
                f"all {groups:,} groups are zero-variance: every reward in a group is equal, so every advantage is 0"
            )
            message = f"{counted(groups, 'group')} ({responses}) have equal rewards: {ends}"
            otherwise = "call the reward function on some responses to one prompt: it may be constant, its parser may "
            otherwise += "find no answer, or the prompts may be all solved or all too hard"
        else:
            severity = Severity.WARNING if fails else Severity.INFO
            share = f"{percent(run['dead_share'])} of {counted(groups, 'group')} are zero-variance"
            headline = f"every response failed in {failed:,} of {groups:,} groups, whose rewards are all equal"
            headline = headline if fails else f"{share}: all their rewards are equal"
            message = told_of_groups(ends, run, context, _logged_name(context))
            otherwise = "use harder or easier prompts, larger groups, or dynamic sampling (DAPO), which drops "
            otherwise += "zero-variance groups"
        return Judgement(
            severity=severity,
            confirmed=True,
            headline=headline,
            message=message,
            evidence="the rewards of the rows, compared exactly",
            advice=advice or otherwise,
        )


def _logged_name(context: Context) -> str | None:
    """Name of the share that the trainer logs."""
    return None if context.writer is None else context.writer.log.zero_std

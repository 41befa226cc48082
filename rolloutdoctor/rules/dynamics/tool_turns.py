"""RDT020: tools that nobody calls any more, or that fail at every call, from the turns of the rollouts."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.data.schema import FAILED
from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.series import ending
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class ToolTurns(TableRule):
    """No rollout has a turn of a tool any more, or every call of one fails.

    ## What it does
    Looks for steps at the end of the run in which no response has a turn of a tool, and for such steps in which the
    turns of tools have an error. `RDT017` reads the same from the trainer's log.

    ## Why it matters
    A policy that has stopped calling its tools answers from memory, and seldom begins again. A tool that is down looks
    like a policy that got worse: its rollouts earn nothing, and the update learns to avoid it.

    ## How it is measured
    Only turns that the run states (the column `turns`) count, not those derived from the mask. `calls` is the number of
    tool turns per response, `failed_share` the share of these with an error, or with a status such as timeout. It is a
    warning if a step has no call, or nine of ten fail, in each of the last three steps or more. If such steps are as
    common before, those at the end are chance: their earlier share, to the power of their number at the end, has to be
    below 1 in 1,000. Confirmed: the turns are the proof. A run in which no tool ever took a turn is not judged.

    ## What to do
    No calls: read responses of the first such step; look at the chat template, the parser of calls, and rewards that
    are higher without a call. Failing calls: look at the service behind the tool, and leave these rollouts out.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose, toy_batch, toy_turns
    >>> called, alone = [("model", 0, 1), ("tool", 1, 2), ("model", 2, 4)], [("model", 0, 4)]
    >>> turns = [toy_turns(each, each) for each in [called] * 4 + [alone] * 4]
    >>> batches = [replace(toy_batch([[1, 0]], step=step), turns=each) for step, each in enumerate(turns)]
    >>> diagnose(batches, trainer=None, select=["RDT020"]).findings[0].headline
    'no response has a turn of a tool from step 4 on: 1 each before'
    """

    code = "RDT020"
    name = "tool-turns"
    references = (
        "https://github.com/PrimeIntellect-ai/verifiers/issues/3071",
        "https://github.com/verl-project/verl/issues/5635",
    )
    needs_objective = False
    splits = ("train",)
    needs = ("turns",)
    optional = ("failed_share",)

    lasting: int = 3
    chance: float = 1e-3
    failing: float = 0.9

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step: its responses with turns, the turns of tools, and those that failed."""
        is_tool = pl.col("author") == "tool"
        has_failed = (pl.col("error").fill_null("") != "") | pl.col("status").str.to_lowercase().is_in(FAILED)
        return (
            run.turns.filter(~pl.col("derived"))
            .group_by(STEP_KEY)
            .agg(
                responses=pl.n_unique("row"),
                turns=is_tool.sum(),
                failed=(is_tool & has_failed.fill_null(value=False)).sum(),
            )
            .with_columns(calls=pl.col("turns") / pl.col("responses"))
            .sort("step")
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Calls of a response, and how many of them fail."""
        return {
            "calls": (pl.sum("turns") / pl.sum("responses"), "calls"),
            "failed_share": (pl.when(pl.sum("turns") > 0).then(pl.sum("failed") / pl.sum("turns")), "share"),
            "steps_without_calls": ((pl.col("turns") == 0).sum(), "steps"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps without a call, or with most that fail."""
        return table.with_columns(value=pl.when(pl.col("turns") == 0).then(1.0).otherwise(pl.col("failed")))

    def note(self, place: Mapping[str, Any]) -> str:
        """Its calls."""
        return (
            f"{counted(place['turns'], 'call')} in {counted(place['responses'], 'response')}, {place['failed']:,} fail"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Fewer steps than would be a finding."""
        if len(run.table) >= self.lasting:
            return None
        return Missing(f"needs {self.lasting} steps with turns; there are {len(run.table)}", "widen --steps")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No tools."""
        return None if run.table["turns"].sum() else "no response has a turn of a tool"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the end of the run: no call, else calls that fail."""
        turns, failed = run.table["turns"].to_numpy(), run.table["failed"].to_numpy()
        if not turns.sum():
            return None
        calls = run.table["calls"].to_numpy()
        since = ending(turns == 0, self.lasting, self.chance)
        # Of a run with calls there is a step before it.
        if since:
            subject, before = (
                "no response has a turn of a tool",
                f": {number(float(calls[:since].sum() / since))} each before",
            )
            advice = "check the chat template, the parser of calls, and whether responses without a call earn more"
            return self._judged(run, since, subject, before, advice)
        since = ending((failed >= self.failing * turns) & (turns > 0), self.lasting, self.chance)
        if since is None:
            return None
        subject = f"{percent(float(failed[since:].sum() / turns[since:].sum()))} of the calls of tools fail"
        return self._judged(
            run, since, subject, "", "check the service behind the tool, and leave failed rollouts out of the baseline"
        )

    def _judged(self, run: Measured, since: int, subject: str, before: str, advice: str) -> Judgement:
        onset, steps = int(run.table["step"][since]), counted(len(run.table) - since, "step")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"{subject} from step {onset} on{before}" if since else f"{subject} in all of {steps}",
            message=f"{subject[0].upper()}{subject[1:]}, in {steps} from step {onset} on.",
            evidence="the turns of the responses",
            advice=f"read responses of step {onset}; {advice}",
            measures={"onset": Measure(onset, "step")},
        )

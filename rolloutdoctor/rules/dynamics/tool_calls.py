"""RDT017: tools that nobody calls any more, or that fail at every call, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.logged_quantities import NO_SUCH_METRIC, is_rounded
from rolloutdoctor.rules.numbers_rule import NumbersRule, go_back, series, step_at
from rolloutdoctor.rules.series import ending
from rolloutdoctor.rules.table_rule import Measured


class ToolCalls(NumbersRule):
    """No tool is called any more, or every call fails.

    ## What it does
    Looks for steps at the end of the log in which no response called a tool, and for such steps in which the calls
    failed.

    ## Why it matters
    A policy that has stopped calling its tools answers from memory, and seldom begins again: no rollout is left in
    which a call is rewarded. A tool that is down looks like a policy that got worse, and the update learns to avoid it.

    ## How it is measured
    `tool_calls` is the logged number of calls per response, `tool_failures` the logged share of calls that failed. It
    is a warning if the calls are exactly 0 in each of the last five logged steps or more, or nine of ten calls failed
    in each of them. If such steps are as common before, those at the end are chance: their earlier share, to the power
    of their number at the end, has to be below 1 in 1,000. A log that rounds the calls to fewer than two decimals
    cannot show it. Confirmed: the log itself is the proof.

    ## What to do
    No calls: read responses of the first such step; look at the chat template and the parser of calls, and at rewards
    that are higher without a call. Failing calls: look at the service behind the tool at that step, and leave out what
    was sampled from then on.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT017", tool_calls=[1.2] * 10 + [0.0] * 10)
    'RDT017 warning confirmed: tool_calls 0.6'
    """

    code = "RDT017"
    name = "tool-calls"
    references = (
        "https://github.com/PrimeIntellect-ai/verifiers/issues/3071",
        "https://github.com/verl-project/verl/issues/5635",
    )
    about = ("tool_calls",)
    beside = ("tool_failures",)

    lasting: int = 5
    chance: float = 1e-3
    failing: float = 0.9

    def inapplicable_reason(self, context: Context) -> str | None:
        """A trainer that has tools logs their calls."""
        return None if "tool_calls" in context.quantities else NO_SUCH_METRIC

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Calls that the log rounded to 0, where it has fewer than two decimals."""
        if len(run.table) and (run.table["tool_calls"] == 0).any() and is_rounded(context, "tool_calls", coarse=0.01):
            return Missing("the log rounds the number of tool calls to 0", "log it with more digits")
        return super().inconclusive_reason(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the end of the run: no call, else calls that fail."""
        calls, failures = series(run, "tool_calls"), series(run, "tool_failures")
        since = ending(calls == 0, self.lasting, self.chance)
        if since is not None:
            onset, before = step_at(run, since), float(calls[:since].mean()) if since else 0.0
            never = f"no tool was called in any of {counted(len(calls), 'logged step')}"
            return _judged(
                run,
                since,
                f"no tool is called from step {onset} on: {number(before)} calls a response before" if since else never,
                "no response called a tool",
                f"read responses of step {onset}; check the chat template, the parser of tool calls, and whether "
                "responses without a call get the higher reward" + (f"; {go_back(run, onset)}" if since else ""),
            )
        since = ending((failures >= self.failing) & (calls > 0), self.lasting, self.chance)
        if since is None:
            return None
        onset, share = step_at(run, since), percent(float(failures[since:].mean()))
        return _judged(
            run,
            since,
            f"{share} of the tool calls fail from step {onset} on",
            f"{share} of the tool calls failed",
            f"check the service behind the tool at step {onset}; {go_back(run, onset)}, and leave failed rollouts out "
            "of the baseline",
        )


def _judged(run: Measured, since: int, headline: str, sentence: str, advice: str) -> Judgement:
    """Return a warning about the last lines of the log."""
    onset, lines = step_at(run, since), counted(len(run.table) - since, "logged step")
    return Judgement(
        severity=Severity.WARNING,
        confirmed=True,
        headline=headline,
        message=f"In {lines}, from step {onset} on, {sentence}.",
        evidence="the logged tool calls, and the share of them that failed",
        advice=advice,
        measures={"onset": Measure(onset, "step")},
    )

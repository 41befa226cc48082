"""RDT010: steps that took many times as long as the others, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, percent
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.table_rule import Measured


class ThroughputFault(NumbersRule):
    """Single steps took many times as long as the others.

    ## What it does
    Names the steps whose logged time is far above the median, the longest first.

    ## Why it matters
    A stalled engine, a verifier that runs into its timeout, or one response ten times as long as the others holds up
    all workers.

    ## How it is measured
    `slow_steps` took more than five times the median, not counting the first logged step; `time_share` is their share
    of all logged time. Information: a step may have saved a checkpoint, or evaluated.

    ## What to do
    Look at the logs of the engine and of the verifier at these steps, and at the longest response.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT010", step_time=[30.0, 31.0] * 10 + [400.0])
    'RDT010 info exposed: step_time 48.1'
    """

    code = "RDT010"
    name = "throughput-fault"
    references = ("https://github.com/volcengine/verl/issues/1306",)
    about = ("step_time",)

    times: float = 5.0

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare each step with the median."""
        import numpy as np

        values = series(run, "step_time")[1:]
        median = float(np.median(values))
        slow = np.flatnonzero(values > self.times * median)
        if not len(slow) or median <= 0:
            return None
        worst, share = int(np.argmax(values)), float(values[slow].sum() / values.sum())
        longest = float(values[worst])
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=f"step {step_at(run, worst + 1)} took {number(longest)} s, {number(longest / median)} times the "
            "median",
            message=(
                f"{counted(len(slow), 'step')} took more than {number(self.times * median)} s: {percent(share)} of "
                "the whole time."
            ),
            evidence=f"the logged times of {counted(len(values), 'step')}, without the first",
            advice="check the engine's and the verifier's logs at these steps",
            measures={"slow_steps": Measure(len(slow), "steps"), "time_share": Measure(share, "1")},
        )

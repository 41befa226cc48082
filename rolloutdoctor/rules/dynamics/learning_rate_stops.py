"""RDT012: the learning rate is 0 from some step on while the run goes on, from the trainer's log alone."""

from collections.abc import Collection
from typing import ClassVar

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.table_rule import Measured


class LearningRateStops(NumbersRule):
    """The learning rate is exactly 0 from some step on, and the run goes on.

    ## What it does
    Looks for zeros at the end of the logged learning rates.

    ## Why it matters
    Steps with a learning rate of 0 are paid for and train nothing. The scheduler was built for fewer steps than the run
    has, or a restart lost its state.

    ## How it is measured
    `zero_steps` are the logged steps at the end whose rate is 0, after one that was not: an error if they are a quarter
    of the log or more, a warning from three steps and a twentieth. A schedule that ends at 0 has one such step. A log
    that rounds the rate cannot show it. Confirmed: the log itself is the proof.

    ## What to do
    Give the scheduler the number of optimizer steps of the whole run, and restore its state with the optimizer's.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT012", learning_rate=[1e-6] * 10 + [0.0] * 10)
    'RDT012 error confirmed: learning_rate 5e-07'
    """

    code = "RDT012"
    name = "learning-rate-stops"
    references = ("https://github.com/huggingface/transformers/issues/28124",)
    about = ("learning_rate",)

    least_steps: int = 3
    least_share: float = 0.05
    much: float = 0.25
    fewest_rates: int = 3
    """Different rates that tell decimals of a console from those that a rate happens to have."""
    decimals: ClassVar[tuple[int, ...]] = (7, 8, 9, 10)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A rate that the log rounded to 0."""
        rates = {rate for rate in run.table["learning_rate"].to_list() if rate}
        is_printed = is_rounded(context, "learning_rate") or self._are_printed(rates)
        if len(run.table) and (run.table["learning_rate"] == 0).any() and is_printed:
            return Missing("the log rounds the learning rate to 0", "log it with more digits")
        return super().inconclusive_reason(run, context)

    def _are_printed(self, rates: Collection[float]) -> bool:
        """Tell rates with as many decimals as a console prints (``0.00000004``), of which some have one digit."""
        return len(rates) >= self.fewest_rates and any(
            min(rates) < 10.0 ** (1 - places) and all(round(rate, places) == rate for rate in rates)
            for places in self.decimals
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Count the zeros at the end."""
        import numpy as np

        values = series(run, "learning_rate")
        moving = np.flatnonzero(values > 0)
        if not len(moving):
            return None
        at = int(moving[-1]) + 1
        zeros = len(values) - at
        if zeros < max(self.least_steps, self.least_share * len(values)):
            return None
        onset = step_at(run, at)
        lines = f"{zeros:,} of {counted(len(values), 'logged step')}"
        return Judgement(
            severity=Severity.ERROR if zeros >= self.much * len(values) else Severity.WARNING,
            confirmed=True,
            headline=f"the learning rate is 0 from step {onset} on: nothing is trained in the last {lines}",
            message=f"The learning rate is {number(float(values[at - 1]))} before step {onset} and exactly 0 from "
            f"there on, in {lines}.",
            evidence="the logged learning rate",
            advice="give the scheduler the number of optimizer steps of the whole run, and restore its state at a "
            "restart",
            measures={"onset": Measure(onset, "step"), "zero_steps": Measure(zeros, "steps")},
        )

"""RDT009: the learning rate is 0, or still warming up, from the trainer's log alone."""

from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, series, step_at
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


class LearningRate(NumbersRule):
    """The learning rate is 0 in every step, rises to the last step, or jumps.

    ## What it does
    Reads the logged learning rate.

    ## Why it matters
    With a learning rate of 0 nothing is trained, whatever the loss does. A warmup that is longer than the run never
    reaches the rate that was asked for.

    ## How it is measured
    `learning_rate_max` is the largest logged rate. It is an error if it is 0 (of three to nine lines a warning); a
    warning if the rate rises in every logged step up to the last of the run (95 % of its length, if the log or the
    options state it). If nothing states it, a warning from fifty logged steps and information below. It is a
    warning if the rate jumps to ten times that of the line before and five times every rate before that, which no
    schedule does; a warmup of which few lines are logged rises as fast after the jump as in it, within a quarter.
    Confirmed: the log itself is the proof.

    ## What to do
    Look at the warmup steps and the scheduler, and at whether the optimizer's parameter groups have the rate.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT009", learning_rate=[0.0] * 12)
    'RDT009 error confirmed: learning_rate 0'
    """

    code = "RDT009"
    name = "learning-rate"
    references = ("https://github.com/huggingface/transformers/issues/28124",)
    about = ("learning_rate",)

    enough: int = 50
    end: float = 0.95
    jump: float = 10.0
    above: float = 5.0
    bend: float = 0.25
    lasting: int = 3
    """Lines of a rate of 0 that are no end of a schedule, whose last line may have it."""

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge a few lines without a rate: a warning, since others may have one."""
        is_none = len(run.table) >= self.lasting and not series(run, "learning_rate").any()
        judgement = self.judge_log(run, context) if is_none else None
        return None if judgement is None else replace(judgement, severity=Severity.WARNING)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A rate that the log rounded to 0."""
        if len(run.table) and not (run.table["learning_rate"] != 0).any() and is_rounded(context, "learning_rate"):
            return Missing("the log rounds the learning rate to 0", "log it with more digits")
        return super().inconclusive_reason(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the largest rate, and at where it comes."""
        import numpy as np

        values = series(run, "learning_rate")
        if values.min() < 0:
            return None
        largest, severity, jump = float(values.max()), Severity.WARNING, self._jump(values, run)
        measures = {"learning_rate_max": Measure(largest, "1")}
        if largest == 0 and not is_rounded(context, "learning_rate"):
            words = f"the learning rate is 0 in all {len(values):,} logged steps", "Nothing is trained"
            severity = Severity.ERROR
        elif largest and bool((np.diff(values) > 0).all()) and not self._is_unfinished(run, context):
            words = f"the learning rate still rises at the last step, {number(largest)}", "The warmup never ended"
            if context.total_steps is None and len(values) < self.enough:
                severity = Severity.INFO
        elif jump is not None:
            onset = step_at(run, jump)
            measures["onset"] = Measure(onset, "step")
            rates = from_to(float(values[jump - 1]), float(values[jump]))
            words = f"the learning rate jumps {rates} at step {onset}", "No schedule does that"
        else:
            return None
        return Judgement(
            severity=severity,
            confirmed=True,
            headline=words[0],
            message=f"{words[1]}: {words[0]}.",
            evidence=f"the logged learning rate of {counted(len(values), 'step')}",
            advice="check the warmup steps, the scheduler and the parameter groups of the optimizer",
            measures=measures,
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log that ends within the warmup."""
        import numpy as np

        if not self._is_unfinished(run, context) or not bool((np.diff(series(run, "learning_rate")) > 0).all()):
            return None
        last = step_at(run, len(run.table) - 1)
        return Missing(
            f"the log ends at step {last:,} of {context.total_steps:,}, where the warmup may not be over", LONGER_LOG
        )

    def _is_unfinished(self, run: Measured, context: Context) -> bool:
        """Tell whether the log ends before the run does."""
        total = context.total_steps
        return total is not None and step_at(run, len(run.table) - 1) < self.end * total

    def _jump(self, values: "Values", run: Measured) -> int | None:
        """Return the first line whose rate is far above that of the line before, and above all before that."""
        import numpy as np

        before, highest = values[:-1], np.maximum.accumulate(values[:-1])
        is_jump = (before > 0) & (values[1:] > self.jump * before) & (values[1:] > self.above * highest)
        slopes = np.diff(values) / np.maximum(np.diff(run.table["step"].to_numpy()), 1)
        # A line of the rate after its first step, and the next one ten steps later, are of one warmup.
        is_jump[:-1] &= np.abs(slopes[1:] - slopes[:-1]) > self.bend * slopes[:-1]
        jumps = np.flatnonzero(is_jump)
        return int(jumps[0]) + 1 if len(jumps) else None

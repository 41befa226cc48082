"""RDT009: the learning rate is 0, or still warming up, from the trainer's log alone."""

from dataclasses import dataclass

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import NumbersRule, series
from rolloutdoctor.rules.table_rule import Measured


@dataclass(frozen=True)
class LearningRate(NumbersRule):
    """The learning rate is 0 in every step, rises to the last step, or is above the one that the options state.

    ## What it does
    Reads the logged learning rate.

    ## Why it matters
    With a learning rate of 0 nothing is trained, whatever the loss does. A warmup that is longer than the run never
    reaches the rate that was asked for.

    ## How it is measured
    `learning_rate_max` is the largest logged rate. An error if it is 0; a warning if the rate rises in every logged
    step up to the last; a warning if it is above the option `learning_rate` (verl: `actor.optim.lr`) that the run
    states. Confirmed: the log itself is the proof.

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
        largest, stated = float(values.max()), _stated(context)
        if largest == 0 and not is_rounded(context, "learning_rate"):
            words = f"the learning rate is 0 in all {len(values):,} logged steps", "Nothing is trained"
        elif largest and bool((np.diff(values) > 0).all()):
            words = f"the learning rate still rises at the last step, {number(largest)}", "The warmup never ended"
        elif stated is not None and largest > stated * (1 + 1e-3):
            words = (
                f"the learning rate reaches {number(largest)}, above the stated {number(stated)}",
                "It is not what was asked for",
            )
        else:
            return None
        return Judgement(
            severity=Severity.ERROR if largest == 0 else Severity.WARNING,
            confirmed=True,
            headline=words[0],
            message=f"{words[1]}: {words[0]}.",
            evidence=f"the logged learning rate of {counted(len(values), 'step')}",
            advice="check the warmup steps, the scheduler and the parameter groups of the optimizer",
            measures={"learning_rate_max": Measure(largest, "1")},
        )


def _stated(context: Context) -> float | None:
    """The rate that the run's options state."""
    settings = {} if context.config is None else context.config.settings
    for name, setting in settings.items():
        if name.rpartition(".")[2] in ("learning_rate", "lr") and setting.is_stated and not setting.assumed:
            return float(setting.value) if isinstance(setting.value, int | float) else None
    return None

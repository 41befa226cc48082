"""RDG012: the KL is not 0 before the first update: the reference is another model, from the log alone."""

from dataclasses import dataclass

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, number
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.table_rule import Measured


@dataclass(frozen=True)
class ReferenceNotInitial(NumbersRule):
    """The KL of the first step is as large as that of later ones, though nothing was updated before it.

    ## What it does
    Compares the logged KL of step 1 with that of the next steps.

    ## Why it matters
    Before the first update the policy is the model that training started from, so its KL to the right reference is 0. A
    KL from the reference that is not 0 then says that the reference is another one: the base below an adapter, another
    checkpoint, or the same in another precision. The KL term pulls the policy there.

    ## How it is measured
    `kl_at_start` is the logged KL of step 1. A warning above 0.01 nats, and above half of the median over the next five
    steps. It is about a log alone, and skipped where that starts later, as that of a resumed run does, and where the
    trainer's KL of a step may be measured after updates within it (verl, slime). Exposed: a reference may differ on
    purpose.

    ## What to do
    Check which weights the reference was loaded from; for an adapter on top of another, merge that one first.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDG012", "trl", kl=[0.2, 0.21, 0.2, 0.22, 0.2, 0.2], beta=0.1)
    'RDG012 warning exposed: kl 0.205'
    """

    code = "RDG012"
    name = "reference-not-initial"
    references = ("https://github.com/unslothai/unsloth/issues/4934",)
    about = ("kl",)

    fewest: int = 6
    floor: float = 0.01

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts: log and rows may be numbered apart, so that the first KL need not be that of the first step."""
        return "this rule tests logs without rollouts" if context.has_rows else None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A KL that is measured after updates within the first step, or nobody knows when."""
        missing = super().unavailable_reason(context)
        if missing is None and not context.quantities["kl"][1].before_update:
            return Missing(
                "nothing says that the logged KL of the first step is measured before an update", context.unstated
            )
        return missing

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log that does not begin with the training."""
        if len(run.table) and step_at(run, 0) > 1:
            return Missing(f"the log starts at step {step_at(run, 0)}", "check a log that starts with the training")
        return super().inconclusive_reason(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the first step with the next five."""
        import numpy as np

        values = series(run, "kl")
        if step_at(run, 0) > 1:
            return None
        first, later = float(values[0]), float(np.median(values[1 : self.fewest]))
        if first <= self.floor or first <= later / 2:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the KL is {number(first)} nats before the first update: the reference is not the initial model",
            message=f"The KL from the reference is {number(first)} nats at step {step_at(run, 0)}, before any "
            f"update, and "
            f"{number(later)} in the next steps: the reference is not the model that the training started from.",
            evidence="the logged KL of the first step",
            advice=(
                "check which weights the reference was loaded from; if you train a new adapter on an old one, merge "
                "the old one first"
            ),
            measures={"kl_at_start": Measure(first, "nats"), "onset": Measure(step_at(run, 0), "step")},
        )

"""RDM007: a metric is off by a constant factor."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement, counted, number

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


class MetricScaleFactor(DirectRule):
    """A logged metric is a constant factor times what the rows give.

    ## What it does
    Where logged values of a metric disagree with the rows, looks for one factor that brings all of them within their
    rounding radii, and for what it is: a whole number of micro-batches, ranks or accumulation steps, one over such a
    number, the base of a logarithm, or -1. Where a trainer logs a share of its loss by its own definition, says which
    one: that is information.

    ## Why it matters
    The curve has the right shape and the wrong scale: coefficients tuned by it and comparisons with other runs are off
    by that factor. If the loss itself is scaled, so is the learning rate.

    ## How it is measured
    The factor lies in the interval of factors that fit all values that disagree. To count as a number of parts, 2 to
    1,024, that interval must be no wider than 1/64 of a part, or than 0.27 % for a power of two. For a single value,
    and for the base of a logarithm, it must also be no wider than one part in ten thousand; -1 takes two values or
    more. A factor also multiplies what float32 arithmetic lost of a value; the digits of the log are lost after it. If
    the values of other steps agree as they are and are not 0, the chance that the intervals hold a whole number must be
    at most 1 in 256: a mean of few rewards or counts is often twice another one. Clean: every logged value that was
    compared agrees as it is.

    ## What to do
    Divide once: look for the count of that size in the trainer's logging, and in the loss.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0, 0], [0, 0, 0]])
    >>> diagnose_one("RDM007", batch, trainer="trl", logged={"reward": 4 / 6})
    'RDM007 error confirmed: values_compared 1'
    """

    code = "RDM007"
    name = "metric-scale-factor"
    references = ("https://github.com/volcengine/verl/issues/4711", "https://github.com/volcengine/verl/issues/3691")
    stages = ("kl", "loss", "metrics")

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Return the share of the loss that the trainer logs, where it logs one."""
        trainer, evaluation = step.trainer, step.evaluation
        if trainer is None or evaluation is None or trainer.log.loss not in step.logged or not step.training:
            return {}
        return {"loss_share": trainer.log.loss_share(evaluation)}

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Say by what the logged loss is divided, if it is."""
        shares: list[float] = run.run.by_step("loss_share")["loss_share"].drop_nulls().to_list()
        if context.trainer is None or all(share == 1 for share in shares):
            return None
        tally = context.audit.get(context.trainer.log.loss)
        if tally is None or not tally.is_tested or tally.disagree:
            return None  # ranks without a row have micro-batches too
        name, least, most = context.trainer.log.loss, min(shares), max(shares)
        of_all = number(most) if least == most else f"{number(least)} to {number(most)}"
        why, advice = context.trainer.log.share_is
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"{name} is {of_all} of the step's loss: {context.trainer.title} {why}",
            message=f"the logged loss of {counted(len(shares), 'step')} depends on how micro-batches were cut; the "
            "gradient does not",
            evidence="the rows reproduce the logged losses with that factor",
            advice=advice,
            measures={"loss_share": Measure(sum(shares) / len(shares), "share")},
        )

    remedy = "log the trainer's metrics of every step beside the run"

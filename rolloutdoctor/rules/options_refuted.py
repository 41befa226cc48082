"""RDI014: the log refutes an option."""

from collections.abc import Mapping
from dataclasses import dataclass

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.audited import AuditedRule, AuditedTally, judged
from rolloutdoctor.rules.base import Context, Judgement, Missing


@dataclass(frozen=True)
class OptionsRefuted(AuditedRule):
    """What was logged contradicts an option that is recorded, given or assumed.

    ## What it does
    Before any arithmetic, holds the names and values in the log against the options: a KL above zero refutes a
    coefficient of zero, and a metric that only one setting logs refutes the others. After the audit, names the option
    whose other value gives the logged numbers: another estimator, scale or aggregation.

    ## Why it matters
    Every number in this report follows from the options. Where one is wrong, the numbers are those of another run. An
    option that was only assumed, and that the log refutes, is not used.

    ## How it is measured
    A name or value in the log that is impossible under the option; or all logged values of a quantity that agree,
    within their rounding radii, with another value of the option and not with the recorded one. Clean: no name in the
    log is impossible, and no logged value disagrees; an option that changes nothing that was logged was not tested.

    ## What to do
    State the option that the run had with --set KEY=VALUE, or correct the file's metadata.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0]], ref=-1.3)
    >>> diagnose_one("RDI014", batch, trainer="trl", beta=0, logged={"kl": 0.05})
    'RDI014 error confirmed: values_compared 0'
    """

    code = "RDI014"
    name = "options-refuted"
    references = ("https://github.com/huggingface/trl/issues/2703",)
    stages = ("advantages", "kl", "loss", "metrics")
    needs_rows = False
    needs_objective = False

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """Nothing logged, nothing refuted."""
        if context.refuted or context.refutable:
            return None
        return super().inconclusive_reason(run, context)

    def measures(self, tally: AuditedTally) -> Mapping[str, Measure]:
        """How many logged values follow from the options."""
        return super().measures(tally)

    def judge(self, run: AuditedTally, context: Context) -> Judgement | None:
        """An error: the run is not what its options say."""
        causes = context.causes.get(self.code, ())
        if context.refuted:
            first = context.refuted[0]
            more = f" (and {len(context.refuted) - 1} more)" if len(context.refuted) > 1 else ""
            return Judgement(
                # What was only assumed here contradicts nothing that the run says of itself.
                severity=Severity.WARNING if all(one.assumed for one in context.refuted) else Severity.ERROR,
                confirmed=True,
                headline=f"the log refutes {first.option} = {first.value}{more}",
                message="; ".join(one.words for one in context.refuted),
                evidence=first.evidence,
                advice=f"state the option of the run with --set {first.option}=VALUE, and check again",
            )
        return None if not causes else judged(causes, Severity.ERROR)

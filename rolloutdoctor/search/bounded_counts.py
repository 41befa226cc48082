"""Count over the steps of a run whether hypotheses that leave something open give what no other one does."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import log2

from rolloutdoctor.audit.tally import ENOUGH_BITS, AuditTally, rounded_down
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.ops.logged_digits import rounding_of
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.search.diagnosis import Diagnosis
from rolloutdoctor.search.hypotheses.bounded import KINDS, BoundedHypothesis, rows_of
from rolloutdoctor.search.step import Step
from rolloutdoctor.trainers.spec import Trainer


@dataclass
class BoundedCount:
    """What speaks for a hypothesis, over the steps of a run.

    Attributes:
        hypothesis: which one.
        bits: evidence: of a step whose share of clipped rows follows, the logarithm of how many shares there are.
        refuted: a value lies outside of its interval, or cannot be compared.
        explained: disagreeing metrics to how many of their values lie in their interval.
        steps: those with such a value.
    """

    hypothesis: BoundedHypothesis
    bits: float = 0.0
    refuted: bool = False
    explained: dict[str, int] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)

    def add(self, step: Step, tallies: AuditTally, evaluation: Evaluation | None, trainer: Trainer) -> None:
        """Add a step, audited and evaluated under everything that is established."""
        of_ratio = {name: tally for name, tally in tallies.items() if trainer.log.kind_of(name) in KINDS}
        off = tuple(name for name, tally in of_ratio.items() if tally.disagree)
        if self.refuted or not off:
            return
        if evaluation is None or any(name not in step.metrics for name in off):
            self.refuted = True  # a mean over several steps
            return
        intervals = self.hypothesis.intervals(evaluation, trainer, off)
        shares = 0
        for name in off:
            low, high = intervals.get(name, (1.0, -1.0))
            rounding = rounding_of(step.digits, name, step.metrics[name])
            if not low - rounding <= step.metrics[name] <= high + rounding:
                self.refuted = True
                return
            self.explained[name] = self.explained.get(name, 0) + 1
            shares += trainer.log.kind_of(name) == "clip_share" and high - low < 1 / (rows_of(evaluation) + 1)
        self.steps.append(step.batch.step)
        if shares:
            self.bits += rounded_down(log2(rows_of(evaluation) + 1))

    def cause(self, diagnosis: Diagnosis, trainer: Trainer) -> Cause | None:
        """Return it as a cause of what is unexplained, if it gives all of that and there is enough evidence."""
        names = [name for name in diagnosis.unexplained if trainer.log.kind_of(name) in KINDS]
        shares = sorted(name for name in names if trainer.log.kind_of(name) == "clip_share")
        if self.refuted or self.bits < ENOUGH_BITS or not shares:
            return None
        if any(self.explained.get(name) != diagnosis.unexplained[name].disagree for name in names):
            return None
        quantity = max(shares, key=lambda name: (diagnosis.unexplained[name].disagree, name))
        tally = diagnosis.unexplained[quantity]
        return Cause(
            hypothesis=self.hypothesis.name,
            code=self.hypothesis.code,
            words=self.hypothesis.words,
            remedy=self.hypothesis.remedy,
            quantity=quantity,
            compared=tally.compared,
            as_recorded=tally.agree,
            as_found=tally.compared,
            worst=1.0,
            explains=tuple(sorted(names)),
            steps=(min(self.steps), max(self.steps), len(set(self.steps))),
            references=self.hypothesis.references,
        )


def bounded_counts(audit: AuditTally, trainer: Trainer, applies: Iterable[BoundedHypothesis]) -> list[BoundedCount]:
    """Return what to count: nothing where no share of clipped rows disagrees."""
    is_off = any(tally.disagree and trainer.log.kind_of(name) == "clip_share" for name, tally in audit.items())
    return [BoundedCount(hypothesis) for hypothesis in applies] if is_off else []


def with_bounds(diagnosis: Diagnosis, counts: Iterable[BoundedCount], trainer: Trainer) -> Diagnosis:
    """Take the first hypothesis that gives what is left."""
    causes = [cause for cause in (count.cause(diagnosis, trainer) for count in counts) if cause is not None]
    if not causes:
        return diagnosis
    cause = replace(causes[0], also=tuple(cause.hypothesis for cause in causes[1:]))
    left = {name: tally for name, tally in diagnosis.unexplained.items() if name not in cause.explains}
    return replace(diagnosis, causes=(*diagnosis.causes, cause), unexplained=left)

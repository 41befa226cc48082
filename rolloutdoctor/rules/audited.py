"""Bases of rules that are judged by the audit: a cause that was established, or a disagreement that none explains."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, advantage_columns, loss_columns
from rolloutdoctor.ops.tally import Sums, largest
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from rolloutdoctor.audit.tally import QuantityTally
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class AuditedTally(Sums):
    """How many logged values were compared with recomputed ones.

    Attributes:
        compared: values that were compared.
        agree: those within their rounding radius.
        not_compared: values that could not be compared.
        worst: largest difference in radii.
        steps: steps in which what the rule is about could show itself.
    """

    compared: int = 0
    agree: int = 0
    not_compared: int = 0
    worst: float = largest()
    steps: int = 0


@dataclass(frozen=True)
class AuditedRule(Rule[AuditedTally]):
    """A rule over logged quantities of some stages of the audit.

    Attributes:
        part_names: parts of the objective of which the rule needs one; none: it is about every objective.
        absent: why the rows rule the fault out, where `occurs` holds in no step.
        shown_by: kinds of quantities (`radii.metrics.METRICS`) that the fault changes; none: any of its stages.
        shown_by_each: True if each of these has to agree, and not one of them.
    """

    tally = AuditedTally
    part_names: ClassVar[tuple[Part, ...]] = ()
    absent: ClassVar[str] = "no training step was read"
    shown_by: ClassVar[frozenset[str]] = frozenset()
    shown_by_each: ClassVar[bool] = False

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Return the parts of the objective of which the rule needs one."""
        return self.part_names

    def occurs(self, step: "StepView") -> bool:
        """Return True if what the rule is about could show itself in a step."""
        return True

    def columns(self, context: Context) -> frozenset[str]:
        """Nothing beyond what the audit reads where it is there."""
        return frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """What the trainer logged of its own numbers, and what the loss and the metrics are made of."""
        objective = context.objective
        if objective is None:
            return frozenset()
        of_loss = self.stages != ("advantages",)
        of_rows = LOGGED_COLUMNS | advantage_columns(objective) | {"response_mask"}
        return of_rows | loss_columns(objective) if of_loss else of_rows

    def measure_each(self, steps: "StepView") -> Sequence[AuditedTally]:
        """Count the logged values of each step."""
        return [self.audited(each) for each in steps.each]

    def audited(self, step: "StepView") -> AuditedTally:
        """Count the logged values of one step."""
        occurs = len(step.batch) > 0 and self.occurs(step)
        # Many rules are about the same stages.
        return step.cached(f"audited {occurs} {self.stages}", lambda: self._counted(step, occurs=occurs))

    def _counted(self, step: "StepView", *, occurs: bool) -> AuditedTally:
        by_stage = step.cached("audited", lambda: _by_stage(step.audit.values()))
        counted = [by_stage[stage] for stage in self.stages if stage in by_stage]
        return reduce(add, counted, AuditedTally(steps=int(occurs)))

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The first value of each quantity that disagrees."""
        for each in step.each:
            for name, tally in disagreeing(each).items():
                if tally.stage in self.stages and tally.first is not None:
                    _, sample, logged, recomputed = tally.first
                    note = f"{name}: logged {number(logged)}, recomputed {number(recomputed)}"
                    yield Example(each.batch.step, None, sample or None, tally.worst, note)

    def measures(self, tally: AuditedTally) -> Mapping[str, Measure]:
        """How many logged values follow from the rows and the options."""
        return {
            "values_compared": Measure(tally.compared, "values"),
            "values_agreeing": Measure(tally.agree, "values"),
        }

    def inconclusive_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """Nothing was logged that could show it."""
        means = any(tally.compared for tally in context.means.values() if tally.stage in self.stages)
        if run.compared or means or self.code in context.causes or self.vacuous_reason(run, context):
            return None
        if run.not_compared:
            return Missing("no logged value could be compared: rows or columns of the steps are missing", self.remedy)
        return Missing("nothing was logged that could show it", self.remedy)

    def vacuous_reason(self, run: AuditedTally, context: Context) -> str | None:
        """Rows in which it cannot occur."""
        return None if run.steps else self.absent

    def unseen_reason(self, run: AuditedTally, context: Context) -> Missing | None:
        """A disagreement that may be this fault, or nothing compared that the fault would change."""
        audit = {name: tally for name, tally in context.audit.items() if tally.stage in self.stages}
        left = {name for name in audit if name in context.unexplained or name in context.partly}
        if left:
            verb = "disagrees" if len(left) == 1 and left != {"advantages"} else "disagree"
            return Missing(
                f"the logged {listed(left)} {verb} with the rows, and no hypothesis of this rule explains it",
                "find out what made the logged values; `rolloutdoctor identify` looks for options that give them",
            )
        rival = self._rival(context)
        if rival is not None:
            return Missing(
                f"these data cannot tell what {rival.code} reports from this fault: {rival.hypothesis} gives the same "
                "values",
                f"settle what {rival.code} reports, and check again",
            )
        shown = {name: tally for name, tally in audit.items() if self._shows(name, context)}
        doubted = {name: tally.reason for name, tally in shown.items() if not tally.is_tested}
        if doubted and (self.shown_by_each or len(doubted) == len(shown)):
            return Missing(
                f"not every logged {listed(doubted)} could be compared: {min(doubted.values())}",
                "record what is missing, or leave steps that are not complete out with --steps",
            )
        return None if shown or not audit else Missing("nothing was logged that could show it", self.remedy)

    def _shows(self, name: str, context: Context) -> bool:
        """True if the fault would change a quantity."""
        if not self.shown_by:
            return True
        if name in LOGGED_COLUMNS or context.trainer is None:
            return name in self.shown_by
        return context.trainer.kind_of(name.removesuffix(" (eval)")) in self.shown_by

    def _rival(self, context: Context) -> Cause | None:
        """A cause of another rule that gives the same values as a hypothesis of this one."""
        causes = [cause for found in context.causes.values() for cause in found if cause.also]
        if not causes:
            return None
        from rolloutdoctor.hypotheses.table import HYPOTHESES

        own = {one.name for one in HYPOTHESES if one.code == self.code}
        return next((cause for cause in causes if cause.code != self.code and own & {*cause.also}), None)

    def decisive_parts(self, run: AuditedTally, context: Context) -> tuple[Part, ...]:
        """None: that the logged values agree says that the options are right."""
        return ()

    remedy: ClassVar[str] = "log the trainer's metrics beside the run, and its advantages in the rows"


@dataclass(frozen=True)
class CauseRule(AuditedRule):
    """A rule that reports the hypotheses of its code, where one explains what the options do not.

    Attributes:
        severity: of a cause that was established.
    """

    severity: ClassVar[Severity] = Severity.ERROR

    def judge(self, run: AuditedTally, context: Context) -> Judgement | None:
        """Report the first cause of this code, and name the others."""
        causes = context.causes.get(self.code, ())
        return None if not causes else judged(causes, self.severity)


def judged(causes: tuple[Cause, ...], severity: Severity) -> Judgement:
    """Return the words for a cause that was established."""
    cause = causes[0]
    words = cause.words[:1].upper() + cause.words[1:]
    share = f"{cause.as_found:,} of {cause.compared:,} logged {cause.quantity}"
    others = [name for name in cause.explains if name != cause.quantity]
    message = f"{words}: {share} follow from that, {cause.as_recorded:,} from the recorded options"
    if others:
        listed = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        message += f"; it also explains {listed}"
    evidence = f"worst difference {number(cause.worst)} of its rounding radius"
    if cause.steps is not None:
        first, last, count = cause.steps
        evidence += f"; in {counted(count, 'step')}, {first} to {last}" if count > 1 else f"; in step {first}"
    if cause.as_found < cause.compared:
        evidence = f"{cause.compared - cause.as_found:,} values follow from neither"
    if cause.also:
        evidence += f"; these data cannot tell it from {', '.join(cause.also)}"
    if len(causes) > 1:
        evidence += f"; also: {'; '.join(one.words for one in causes[1:])}"
    return Judgement(
        severity=severity,
        confirmed=True,
        headline=f"{words} ({share})",
        message=message,
        evidence=evidence,
        advice=cause.remedy,
        measures={
            "values_compared": Measure(cause.compared, "values"),
            "values_agreeing": Measure(cause.as_recorded, "values"),
            "values_explained": Measure(cause.as_found, "values"),
            **{name: Measure(value, unit) for name, (value, unit) in cause.measures.items()},
        },
        cause=cause,
    )


@dataclass(frozen=True)
class DiffersRule(AuditedRule):
    """A rule for logged values that follow neither from the options nor from any hypothesis.

    Attributes:
        what: the logged values, as the subject of a sentence.
    """

    what: ClassVar[str]

    def judge(self, run: AuditedTally, context: Context) -> Judgement | None:
        """An error: the run contradicts what it says of itself."""
        causes = context.causes.get(self.code, ())
        found = {name: tally for name, tally in context.unexplained.items() if tally.stage in self.stages}
        if causes:
            established = judged(causes, Severity.ERROR)
            beyond = f"; beyond that, no known cause explains {listed(found)}" if found else ""
            return replace(established, message=established.message + beyond)
        if not found:
            return None
        name, worst = max(found.items(), key=lambda one: (one[1].disagree, one[0]))
        total = sum(tally.disagree for tally in found.values())
        compared = sum(tally.compared for tally in found.values())
        first = ""
        if worst.first is not None:
            step, sample, logged, recomputed = worst.first
            row = f", row {sample}" if sample else ""
            first = (
                f"{name} is {worst.shape}; first at step {step}{row}: logged {logged:.7g}, recomputed {recomputed:.7g}"
            )
        names = listed(found)
        given = context.given if "advantages" in self.stages else frozenset[str]()
        so_made = f"; the update used them: {listed(given)} agree with the logged advantages" if given else ""
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"{total:,} of {compared:,} {self.what} do not follow from the rows and the options ({name})",
            message=f"no known cause explains {names}{so_made}",
            evidence=first,
            advice=(
                "check that the rows are those of the logged steps and the options those of the run; `rolloutdoctor "
                "identify` looks for options that give these values"
            ),
        )


def listed(names: Collection[str]) -> str:
    """Names of quantities, the first six of them.

    >>> listed({"loss", "kl"})
    'kl, loss'
    """
    return ", ".join(sorted(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def disagreeing(step: "StepView") -> "Mapping[str, QuantityTally]":
    """The quantities of one step of which a value disagrees: mostly there is none."""
    return step.cached("disagreeing", lambda: {name: one for name, one in step.audit.items() if one.first is not None})


def _by_stage(tallies: "Iterable[QuantityTally]") -> dict[str, AuditedTally]:
    """Add up the quantities of each stage: many rules are about the same ones."""
    found: dict[str, list[AuditedTally]] = {}
    for one in tallies:
        counts = AuditedTally(one.compared, one.agree, one.not_compared, one.worst)
        found.setdefault(one.stage, []).append(counts)
    return {stage: AuditedTally.of_all(each) for stage, each in found.items()}


def audited_stages(rules: Iterable[Rule[Any]]) -> frozenset[str]:
    """Return the stages that some rules audit: what the others would read in passing is not compared."""
    return frozenset(stage for rule in rules for stage in rule.stages)

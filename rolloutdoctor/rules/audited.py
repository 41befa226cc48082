"""Bases of rules that are judged by the audit: a cause that was established, or a disagreement that none explains."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, advantage_columns, loss_columns
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.table_rule import Measured, Quantity, Rule, with_places

_OF_LOSS = "log the loss and the KL of every optimizer step beside the run"

REMEDIES: Mapping[tuple[str, ...], str] = {
    ("advantages",): "log the advantages: the column advantage (one a row) or advantages (one a token)",
    **dict.fromkeys((("loss",), ("kl", "loss"), ("advantages", "kl", "loss")), _OF_LOSS),
}
"""Stages of the audit to what to log of them."""

OTHERWISE = "log the trainer's metrics beside the run, and its advantages in the rows"


@dataclass(frozen=True, eq=False)
class AuditedMeasured(Measured):
    """Measures of a rule in a run, and the logged values of its stages.

    Attributes:
        compared: values that were compared.
        agree: those within their rounding radius.
        not_compared: values that could not be compared.
        steps: steps in which what the rule is about could show itself.
    """

    compared: int
    agree: int
    not_compared: int
    steps: int

    @property
    def is_reproduced(self) -> bool:
        """True if all values that were logged agree with the rows and the options: the trainer did as they say."""
        return self.compared > 0 and self.agree == self.compared


class AuditedRule(Rule[AuditedMeasured]):
    """A rule over logged quantities of some stages of the audit.

    A subclass may query rows as well: then `table` returns its own lines, with their size as places in `value`,
    together with those of the audit (`with_audit`), and `shown` is the note of a place of its own. One whose fault
    some steps cannot have says so by the value `occurs` of a step.

    Attributes:
        absent: why the rows rule the fault out, where it can show itself in no step.
        remedy: what to log where nothing shows the fault; empty: what its stages make.
        shown_by: kinds of quantities (`radii.metrics.METRICS`) that the fault changes; none: any of its stages.
        shown_by_each: True if each of these has to agree, and not one of them.
    """

    absent: ClassVar[str] = "no training step was read"
    remedy: ClassVar[str] = ""
    shown_by: ClassVar[frozenset[str]] = frozenset()
    shown_by_each: ClassVar[bool] = False

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns that the trainer logged of its own numbers, and those of the loss and the metrics."""
        objective = context.objective
        if objective is None:
            return frozenset()
        of_loss = self.stages != ("advantages",)
        of_rows = LOGGED_COLUMNS | advantage_columns(objective) | {"response_mask"}
        return of_rows | loss_columns(objective) if of_loss else of_rows

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return the lines of the audit."""
        return self.with_audit(pl.DataFrame(schema={"step": pl.Int64, "split": pl.String}), run)

    def with_audit(self, lines: pl.DataFrame, run: RunTables) -> pl.DataFrame:
        """Return the lines of a query and those of the audit; these have a `quantity`."""
        audit = run.lines("audit", pl.col("stage").is_in(self.stages))
        is_off = pl.col("logged").is_not_null()
        audit = audit.with_columns(value=pl.when(is_off).then("worst"), group_id=pl.lit(None, pl.String))
        return pl.concat([lines, audit], how="diagonal_relaxed")

    def measured(self, run: RunTables, context: Context) -> AuditedMeasured:
        """Query a run."""
        queried = self.queried(run, context)
        counts = queried.table.select(pl.sum("compared", "agree", "not_compared")).to_dicts()[0]
        return AuditedMeasured(queried.table, queried.values, run, **counts, steps=self.occurrences(run))

    def occurrences(self, run: RunTables) -> int:
        """Return in how many steps the fault could show itself: where it `occurs`, else those with rows."""
        measured = run.metrics.filter(pl.col("metric") == "occurs")
        return measured.filter(pl.col("logged") > 0).height if len(measured) else run.steps_with_rows

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the numbers of logged values that were compared and reproduced."""
        return {"values_compared": (pl.sum("compared"), "values"), "values_agreeing": (pl.sum("agree"), "values")}

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Values that disagree, and the rule's own places."""
        return table

    def note(self, place: Mapping[str, Any]) -> str:
        """A value that disagrees."""
        if place["quantity"] is None:
            return self.shown(place)
        return f"{place['quantity']}: logged {number(place['logged'])}, recomputed {number(place['recomputed'])}"

    def shown(self, place: Mapping[str, Any]) -> str:
        """Say what is to be seen at a place of the rule's own, in a few words."""
        return ""

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Nothing was logged that could show it."""
        means = any(tally.compared for tally in context.means.values() if tally.stage in self.stages)
        if run.compared or means or self.code in context.causes or self.vacuous_reason(run, context):
            return None
        if run.not_compared:
            return Missing(
                "no logged value could be compared: rows or columns of the steps are missing", self.what_to_log
            )
        return Missing("nothing was logged that could show it", self.what_to_log)

    def vacuous_reason(self, run: AuditedMeasured, context: Context) -> str | None:
        """Rows in which it cannot occur."""
        return None if run.steps else self.absent

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """A disagreement that may be this fault, or nothing compared that the fault would change."""
        audit = {name: tally for name, tally in context.audit.items() if tally.stage in self.stages}
        left = {name for name in audit if name in context.unexplained or name in context.partly}
        if left:
            verb = "disagrees" if len(left) == 1 and left != {"advantages"} else "disagree"
            return Missing(
                f"the logged {listed(left)} {verb} with the rows, and no hypothesis of this rule explains it",
                "find what produced the logged values; `rolloutdoctor identify` searches for options that reproduce "
                "them",
            )
        rival = self._rival(context)
        if rival is not None:
            return Missing(
                f"these data cannot distinguish this fault from what {rival.code} reports: {rival.hypothesis} gives "
                "the same values",
                f"resolve what {rival.code} reports, then check again",
            )
        shown = {name: tally for name, tally in audit.items() if self._shows(name, context)}
        doubted = {name: tally.reason for name, tally in shown.items() if not tally.is_tested}
        if doubted and (self.shown_by_each or len(doubted) == len(shown)):
            return Missing(
                f"not every logged {listed(doubted)} could be compared: {min(doubted.values())}",
                "record what is missing, or exclude incomplete steps with --steps",
            )
        return None if shown or not audit else Missing("nothing was logged that could show it", self.what_to_log)

    def _shows(self, name: str, context: Context) -> bool:
        """True if the fault would change a quantity."""
        if not self.shown_by:
            return True
        if name in LOGGED_COLUMNS or context.trainer is None:
            return name in self.shown_by
        return context.trainer.log.kind_of(name.removesuffix(" (eval)")) in self.shown_by

    def _rival(self, context: Context) -> Cause | None:
        """A cause of another rule that gives the same values as a hypothesis of this one."""
        causes = [cause for several in context.causes.values() for cause in several if cause.also]
        if not causes:
            return None
        from rolloutdoctor.search.hypotheses.table import HYPOTHESES

        names = {hypothesis.name for hypothesis in HYPOTHESES if hypothesis.code == self.code}
        return next((cause for cause in causes if cause.code != self.code and names & {*cause.also}), None)

    def decisive_parts(self, run: AuditedMeasured, context: Context) -> tuple[Part, ...]:
        """None: that the logged values agree says that the options are right."""
        return ()

    @property
    def what_to_log(self) -> str:
        """The remedy where nothing was logged that could show the fault."""
        return self.remedy or REMEDIES.get(self.stages, OTHERWISE)


class CauseRule(AuditedRule):
    """A rule that reports the hypotheses of its code, where one explains what the options do not.

    Attributes:
        severity: of a cause that was established.
    """

    severity: ClassVar[Severity] = Severity.ERROR

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Report the first cause of this code, and name the others."""
        causes = context.causes.get(self.code, ())
        return None if not causes else judged(causes, self.severity)


class DirectRule(CauseRule):
    """A cause rule that looks at rows or options as well, and speaks where the audit found no cause."""

    def direct(self, run: Any, context: Context) -> Judgement | None:  # noqa: ANN401  # `AuditedMeasured`, or what a subclass makes of it
        """Judge what the rows and the options show; None if there is nothing to find."""
        return None

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Neither a logged value nor the rows show it."""
        return super().inconclusive_reason(run, context) if self.direct(run, context) is None else None

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Report a cause that the audit established, else what the rows show."""
        return super().judge(run, context) or self.direct(run, context)


@dataclass(frozen=True, eq=False)
class CountedMeasured(AuditedMeasured):
    """The same with what a direct test counted.

    Attributes:
        looked_at: tokens, rows or steps in which the fault could have shown itself.
        shown: those in which it does.
        size: sum of how far they are off.
    """

    looked_at: int
    shown: int
    size: float


COUNTED = ("looked_at", "shown", "size")


class CountingRule(DirectRule):
    """A direct rule that counts what shows the fault in steps.

    Attributes:
        unit: what the test counts: tokens, rows or steps.
    """

    optional: ClassVar[tuple[str, ...]] = tuple(
        f"{unit}_{end}" for unit in ("tokens", "rows", "steps") for end in COUNTED[:2]
    )
    unit: ClassVar[str] = "tokens"

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return what was counted of steps, and the lines of the audit."""
        return self.with_audit(run.by_step(*COUNTED), run)

    def measured(self, run: RunTables, context: Context) -> CountedMeasured:
        """Query a run."""
        audited = super().measured(run, context)
        looked_at, shown, size = audited.table.select(pl.sum(*COUNTED)).row(0)
        return CountedMeasured(**vars(audited), looked_at=int(looked_at), shown=int(shown), size=size)

    def quantities(self) -> Mapping[str, Quantity]:
        """The audit's, and what was looked at."""
        looked_at, shown = (pl.sum(name).cast(pl.Int64) for name in COUNTED[:2])
        counts = {f"{self.unit}_looked_at": looked_at, f"{self.unit}_shown": shown}
        measures = {name: (pl.when(looked_at > 0).then(value), self.unit) for name, value in counts.items()}
        return {**super().quantities(), **measures}


class RowCountingRule(CountingRule):
    """A direct rule that counts what shows the fault in rows: `COUNTED` are in `adds`.

    Attributes:
        shows: what a place is, after its count.
    """

    shows: ClassVar[str] = ""

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the sums of what was counted of the rows of each step, and the rows that show it."""
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(pl.sum(*self.adds))
        return with_places(sums, rows.select(*NAMES, value=pl.col("shown").cast(pl.Float64)), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return the sums, the rows, and the lines of the audit."""
        return self.with_audit(run.rows, run)

    def shown(self, place: Mapping[str, Any]) -> str:
        """Name the part of a row that shows the fault."""
        return f"{int(place['value']):,} {self.shows}"


def judged(causes: tuple[Cause, ...], severity: Severity) -> Judgement:
    """Return the words for a cause that was established."""
    cause = causes[0]
    words = cause.words[:1].upper() + cause.words[1:]
    share = f"{cause.as_found:,} of {cause.compared:,} logged values of {cause.quantity}"
    others = [name for name in cause.explains if name != cause.quantity]
    message = f"{words}: this reproduces {share}, the recorded options {cause.as_recorded:,}"
    if others:
        listed = ", ".join(others[:4]) + (f" and {len(others) - 4} more" if len(others) > 4 else "")
        message += f"; it also explains {listed}"
    evidence = f"largest error {number(cause.worst)} times the rounding bound"
    if cause.steps is not None:
        first, last, count = cause.steps
        evidence += f"; in {counted(count, 'step')}, {first} to {last}" if count > 1 else f"; in step {first}"
    if cause.as_found < cause.compared:
        evidence = f"neither reproduces {cause.compared - cause.as_found:,} values"
    if cause.also:
        evidence += f"; these data cannot distinguish it from {', '.join(cause.also)}"
    if len(causes) > 1:
        evidence += f"; also: {'; '.join(cause.words for cause in causes[1:])}"
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


class DiffersRule(AuditedRule):
    """A rule for logged values that neither the options nor any hypothesis reproduces.

    Attributes:
        what: the logged values, as the subject of a sentence.
    """

    what: ClassVar[str]
    only_differences: ClassVar[bool] = True

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """An error: the run contradicts what it says of itself."""
        causes = context.causes.get(self.code, ())
        unexplained = {name: tally for name, tally in context.unexplained.items() if tally.stage in self.stages}
        if causes:
            established = judged(causes, Severity.ERROR)
            beyond = f"; beyond that, no known cause explains {listed(unexplained)}" if unexplained else ""
            return replace(established, message=established.message + beyond)
        if not unexplained:
            return None
        name, worst = max(unexplained.items(), key=lambda named_tally: (named_tally[1].disagree, named_tally[0]))
        total = sum(tally.disagree for tally in unexplained.values())
        compared = sum(tally.compared for tally in unexplained.values())
        first = off = ""
        if worst.first is not None:
            step, sample, logged, recomputed = worst.first
            row = f", row {sample}" if sample else ""
            off = (
                f" {constant}"
                if (constant := worst.constant)
                else f": logged {logged:.3g}, recomputed {recomputed:.3g}"
            )
            first = (
                f"{name} is {worst.shape}; first at step {step}{row}: logged {logged:.7g}, recomputed {recomputed:.7g}"
            )
        names = listed(unexplained)
        agreeing = context.given if "advantages" in self.stages else frozenset[str]()
        so_made = f"; the update used the logged advantages: {listed(agreeing)} agree with them" if agreeing else ""
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"the rows and the options do not reproduce {total:,} of {compared:,} {self.what} ({name}{off})",
            message=f"no known cause explains {names}{so_made}",
            evidence=first,
            advice=(
                "check that the rows belong to the logged steps and that the options are the run's; `rolloutdoctor "
                "identify` searches for options that reproduce these values"
            ),
        )


def listed(names: Collection[str]) -> str:
    """Names of quantities, the first six of them.

    >>> listed({"loss", "kl"})
    'kl, loss'
    >>> listed("fedcba"), listed("gfedcba")
    ('a, b, c, d, e, f', 'a, b, c, d, e, f and 1 more')
    """
    return ", ".join(sorted(names)[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def audited_stages(rules: Iterable[Rule[Any]]) -> frozenset[str]:
    """Return the stages that some rules audit: what the others would read in passing is not compared."""
    return frozenset(stage for rule in rules for stage in rule.stages)

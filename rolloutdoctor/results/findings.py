"""Results of a check: plain data that every view renders."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.results.audit import AuditEntry, Cause
from rolloutdoctor.results.display import Displayed
from rolloutdoctor.results.rule_pages import page_of
from rolloutdoctor.results.vitals import Vital

if TYPE_CHECKING:
    import polars as pl


ReleaseState = Literal["read", "older", "not read"]
"""Whether the code of a trainer's release was read: an older or a newer one may compute something else."""

READ: ReleaseState = "read"


class Severity(IntEnum):
    """Severity of a finding: a confirmed fault is an error, an exposure a warning, a choice information."""

    INFO = 1
    WARNING = 2
    ERROR = 3

    @property
    def label(self) -> str:
        """The word that users see."""
        return self.name.lower()


def weight_of(severity: Severity, verdict: str) -> tuple[int, bool]:
    """Rank a finding by severity, and within one severity confirmed above exposed.

    >>> weight_of(Severity.WARNING, "exposed") < weight_of(Severity.WARNING, "confirmed")
    True
    """
    return int(severity), verdict == "confirmed"


@dataclass(frozen=True)
class Measure:
    """A number with its unit.

    Attributes:
        value: the number, never rounded; None where it is not defined (a share of nothing).
        unit: what one of it is: ``rows``, ``groups``, ``share``, ``reward``, ``nats``, ``1`` for a bare ratio.
    """

    value: float | int | None
    unit: str


@dataclass(frozen=True)
class Example:
    """Place to look at: a step, and as far as it applies a group and a row.

    Attributes:
        step: optimizer step.
        group_id: name of the group, or None.
        sample_id: name of the row, or None.
        weight: how large the effect is here, in the unit of the rule's headline measure; examples are sorted by it.
        note: what is to be seen there, in a few words.
    """

    step: int
    group_id: str | None
    sample_id: str | None
    weight: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Finding(Displayed):
    """One rule that fired.

    Attributes:
        code: stable code of the rule.
        name: name of the rule.
        severity: how much it matters.
        verdict: ``confirmed`` if logged values prove it, else ``exposed``.
        headline: the magnitude, in a few words.
        message: what was found, one or two sentences.
        evidence: which logged value matched which formula and how closely, or what the exposure rests on.
        advice: what to do.
        measures: the numbers over the whole run.
        per_step: for each step ``{"step": 3, "split": "train", NAME: value, ...}``.
        examples: the worst places, worst first.
        fix: the fix that answers it, or None.
        references: upstream threads and papers.
        cause: the hypothesis that established it, with the counts of logged values; or None.
        why: why it matters, one sentence.
        follows_from: code of the finding that is the cause of this one and counts for it, or None.
        remark: what belongs beside "no fault was found", as a clause; empty for most.
        hinders: it may be why the reward does not rise, and is said before that.
        known: whether a baseline has it, so that it does not change the exit code; None without a baseline.
    """

    code: str
    name: str
    severity: Severity
    verdict: str
    headline: str
    message: str
    evidence: str
    advice: str
    measures: Mapping[str, Measure]
    per_step: tuple[Mapping[str, float | int | str | None], ...] = ()
    examples: tuple[Example, ...] = ()
    fix: str | None = None
    references: tuple[str, ...] = ()
    cause: Cause | None = None
    why: str = ""
    follows_from: str | None = None
    remark: str = ""
    hinders: bool = False
    known: bool | None = None

    @property
    def page(self) -> str:
        """Where the page of its rule is: an address, or the command that prints it."""
        return page_of(self.code)

    @property
    def onset(self) -> float | None:
        """The step from which it holds, as far as it says so."""
        measure = self.measures.get("onset")
        return None if measure is None else measure.value

    @property
    def weight(self) -> tuple[int, bool]:
        """Its rank among findings: see `weight_of`."""
        return weight_of(self.severity, self.verdict)

    def __repr__(self) -> str:
        """Summarise the finding in a line, without the numbers of every step."""
        return f"<Finding {self.code} {self.severity.label} {self.verdict}: {self.headline}>"


LONGER_LOG = "check a longer log"
"""Remedy of a rule that read the log and found too few steps in it."""

NO_REMEDY = "nothing records it; rewards and advantages are computed"
"""What to do about an unknown loss."""

LEAST_TESTED = 0.5
"""Share of the applicable rules below which a run without findings is not judged."""

NO_ROLLOUTS = "there are logged metrics and no rollouts"
"""Reason of a rule on rollouts, where there is a log alone."""

NOTHING_READ = "nothing was read"
"""Reason of a rule of which no step was read, or how it begins."""


@dataclass(frozen=True)
class Skipped:
    """One rule that could not run, and what would make it run."""

    code: str
    name: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class NotApplicable:
    """One rule whose fault the recorded options or the rows rule out."""

    code: str
    name: str
    reason: str


@dataclass(frozen=True)
class Excluded:
    """Effects that a clean verdict resting on a sample excludes: above an upper bound, at 99.9 % confidence.

    Attributes:
        code: code of the rule.
        effect: what the rule looks for, a noun with its article.
        bound: the largest effect that the rows leave possible; infinite where they leave any.
        unit: of the bound, in words.
        estimate: the effect as estimated.
        limit: the effect from which the rule reports.
        seen: the size of the sample.
        of: what it consists of, a plural.
    """

    code: str
    effect: str
    bound: float
    unit: str
    estimate: float
    limit: float
    seen: int
    of: str

    @property
    def words(self) -> str:
        """The clause of a clean verdict."""
        return f"rules out {self.effect} above {f'{self.bound:.3g} {self.unit}'.rstrip()}"

    @property
    def too_wide(self) -> str | None:
        """Explain why the sample does not exclude what the rule looks for; None where it does."""
        if self.bound <= self.limit:
            return None
        size = "any size" if self.bound == math.inf else f"up to {self.bound:.3g} {self.unit}".rstrip()
        return f"{self.seen:,} {self.of} leave {self.effect} of {size} possible; reported from {self.limit:.3g} on"

    @property
    def needed(self) -> str:
        """Name the sample size that would exclude it: the width of the interval falls with the root of the size."""
        if not self.estimate < self.limit < self.bound < math.inf:
            return f"record more {self.of}"
        factor = ((self.bound - self.estimate) / (self.limit - self.estimate)) ** 2
        return f"record about {float(f'{self.seen * factor:.2g}'):,.0f} {self.of}"


@dataclass(frozen=True)
class Coverage:
    """Number of rules that could be tested (found or clean), of all that were selected."""

    tested: int
    rules: int


@dataclass(frozen=True)
class Setting:
    """A configuration value and where it came from."""

    value: object
    origin: str
    assumed: bool = False

    @property
    def is_stated(self) -> bool:
        """True if somebody gave the value: a default that decides nothing in this run is not assumed, and not given."""
        return not self.origin.startswith("default of ")


@dataclass(frozen=True)
class RunSetting:
    """A value that the run states of itself, and that no formula here reads: the learning rate, the seed.

    Attributes:
        name: as its place has it.
        title: what it is, in words; empty for an option of a trainer that is not used.
        value: a number, a flag, a word, or a list of them.
        origin: words for the place.
    """

    name: str
    title: str
    value: object
    origin: str


@dataclass(frozen=True)
class InputSummary:
    """Amount of data that was read."""

    rows: int = 0
    steps: int = 0
    groups: int = 0
    tokens: int = 0

    def __add__(self, other: "InputSummary") -> "InputSummary":
        return InputSummary(
            self.rows + other.rows, self.steps + other.steps, self.groups + other.groups, self.tokens + other.tokens
        )


@dataclass(frozen=True)
class RunResult(Displayed):
    """Result of reading a run: what the head of every page shows.

    Attributes:
        version: version of this package.
        device: where the evaluation ran.
        dtype: of the token values.
        input: how much was read.
        trainer: name of the trainer, or None if nothing says.
        trainer_version: its version, or None.
        config: option name to value and origin.
    """

    version: str
    device: str
    dtype: str
    input: InputSummary
    trainer: str | None
    trainer_version: str | None
    config: Mapping[str, Setting]


@dataclass(frozen=True)
class Report(RunResult):
    """Everything that a check found out.

    Attributes:
        likely_trainers: where nothing says who made the run: those whose metric names the log has.
        release: whether the code of the run's release was read; None where nothing says who made it.
        unread_release: why differences of numbers prove nothing under a release that was not read; empty where it was.
        part: which of the runs in a log was read, where it holds several.
        unknown_options: names of options of the run that are not understood.
        files: names of the files that were read, as they were given.
        findings: worst first, each with what follows from it directly after it.
        clean: ``(code, name)`` of the rules that found nothing where they could have.
        skipped: the rules that could not be tested, each with what would make it so.
        notes: what the numbers rest on that the reader should know, one sentence each.
        audit: every logged quantity with the number of its values that the rows and the options reproduce.
        not_applicable: the rules whose fault the recorded options or the rows rule out.
        excluded: of clean rules whose verdict rests on a sample: what the sample excludes.
        vitals: what the trainer logged of the quantities that most logs have, over the run.
        settings: what the run states of itself beside the options of its objective.
    """

    trainer: str | None = None
    trainer_version: str | None = None
    config: Mapping[str, Setting] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    clean: tuple[tuple[str, str], ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    audit: tuple[AuditEntry, ...] = ()
    not_applicable: tuple[NotApplicable, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    vitals: tuple[Vital, ...] = ()
    likely_trainers: tuple[str, ...] = ()
    release: ReleaseState | None = None
    unread_release: str = ""
    part: str = ""
    unknown_options: tuple[str, ...] = ()
    settings: tuple[RunSetting, ...] = ()
    files: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        """Summarise the report in a line."""
        who = f"{self.trainer} {self.trainer_version or ''}".rstrip() if self.trainer else "unknown trainer"
        codes = ", ".join(finding.code for finding in self.findings) or "nothing found"
        return f"<Report {who}: {codes}; {self.coverage.tested} of {self.coverage.rules} rules tested>"

    @property
    def coverage(self) -> Coverage:
        """Count the rules that could be tested; each rule is found, clean, not applicable or skipped."""
        tested = len(self.findings) + len(self.clean)
        return Coverage(tested, tested + len(self.not_applicable) + len(self.skipped))

    @property
    def is_log_alone(self) -> bool:
        """True if logged metrics were read, and no rollouts."""
        return not self.input.rows and bool(self.input.steps)

    @property
    def testable(self) -> int:
        """Count the rules that apply and that an input of this kind could test: of a log, those that read logs."""
        beyond = sum(rule.reason == NO_ROLLOUTS for rule in self.skipped)
        return self.coverage.rules - len(self.not_applicable) - beyond

    @property
    def is_too_little(self) -> bool:
        """True if fewer than half of the rules that apply could be tested: most faults could not have shown."""
        return self.coverage.tested < LEAST_TESTED * self.testable

    def clean_words(self) -> list[str]:
        """Code and name of each clean rule; where its verdict rests on a sample, with what that excludes."""
        clauses = {entry.code: f": {entry.words}" for entry in self.excluded}
        return [f"{code} {name}{clauses.get(code, '')}" for code, name in self.clean]

    @property
    def nothing_checked(self) -> bool:
        """True if none of the selected rules could be tested."""
        return not self.coverage.tested and bool(self.coverage.rules)

    def frame(self) -> "pl.DataFrame":
        """One row for each measure of each finding as a polars frame."""
        import polars as pl

        lines = [
            (finding.code, finding.name, finding.severity.label, finding.verdict, name, measure.value, measure.unit)
            for finding in self.findings
            for name, measure in finding.measures.items()
        ]
        schema = {"code": pl.String, "name": pl.String, "severity": pl.String, "verdict": pl.String}
        return pl.DataFrame(
            lines,
            schema=schema | {"measure": pl.String, "value": pl.Float64, "unit": pl.String},
            orient="row",
            strict=False,
        )

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The findings that count on their own: those that follow from none of the others."""
        codes = {finding.code for finding in self.findings}
        return tuple(finding for finding in self.findings if finding.follows_from not in codes)

    def worst(self) -> Severity | None:
        """The highest severity found, or None: a consequence may be heavier than its cause."""
        return max((finding.severity for finding in self.findings), default=None)

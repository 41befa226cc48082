"""``--baseline``: findings that are known do not fail a run; new ones and worse ones do."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli.help import RARE
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.results.findings import Finding, Report


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Options about findings that are known."""

    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="FILE.json",
            envvar="ROLLOUTDOCTOR_BASELINE",
            help="Findings in this file, as --write-baseline writes it, do not change the exit code; new ones do, and "
            "those of a higher severity.",
        ),
    ] = None
    write_baseline: Annotated[
        str | None,
        typer.Option(
            "--write-baseline",
            metavar="FILE.json",
            rich_help_panel=RARE,
            help="Write the findings of this check as a baseline.",
        ),
    ] = None


EXPECTED = "give a file that check --write-baseline wrote"
_VERSION = 1


@dataclass(frozen=True)
class Known:
    """Known finding of a rule: the same fault matches again, however large it is.

    Attributes:
        code: of the rule.
        name: of the rule.
        severity: the highest that is known.
        cause: the hypothesis that was established, or None.
    """

    code: str
    name: str
    severity: str
    cause: str | None = None

    def covers(self, finding: "Finding") -> bool:
        """Return True for the same fault at this severity or below."""
        from rolloutdoctor.results.findings import Severity

        same = (self.code, self.cause) == (finding.code, _cause(finding))
        return same and finding.severity <= Severity[self.severity.upper()]


def _cause(finding: "Finding") -> str | None:
    return None if finding.cause is None else finding.cause.hypothesis


def written(report: "Report") -> bytes:
    """Return the findings of a report as a baseline, one line each so that they merge."""
    lines = [
        json.dumps(
            {"code": finding.code, "name": finding.name, "severity": finding.severity.label, "cause": _cause(finding)}
        )
        for finding in report.findings
    ]
    body = ",\n    ".join(lines)
    findings = f"[\n    {body}\n  ]" if lines else "[]"
    return f'{{\n  "baseline": {_VERSION},\n  "findings": {findings}\n}}\n'.encode()


def read(path: str) -> tuple[Known, ...]:
    """Return the known findings of a baseline.

    Raises:
        UsageError: if the file cannot be read, or is no baseline.
    """
    from rolloutdoctor.io.locations.small_files import read_small
    from rolloutdoctor.io.locations.targets import shown
    from rolloutdoctor.results.findings import Severity

    text = read_small(path, expected=EXPECTED)
    labels = [severity.label for severity in Severity]
    try:
        body = json.loads(text)
        if body["baseline"] != _VERSION:
            raise UsageError(f"{shown(path)}: baseline version {body['baseline']!r} where {_VERSION} was expected")
        baseline = tuple(Known(**entry) for entry in body["findings"])
        for entry in baseline:
            texts = (entry.code, entry.name, entry.severity, "" if entry.cause is None else entry.cause)
            if entry.severity not in labels or not all(isinstance(each, str) for each in texts):
                raise ValueError("a severity, code or cause is not known")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{shown(path)} is not a baseline; {EXPECTED}") from error
    return baseline


def compared_with_baseline(report: "Report", baseline: Sequence[Known] | None) -> "tuple[Report, Report]":
    """Return the report with what the baseline says of it, and the same with the new findings alone.

    The first is printed, the second decides the exit code. Known faults that were not found any more are said if their
    rule could be tested.

    Args:
        report: the report.
        baseline: the findings of the baseline; None: there is none.
    """
    if baseline is None:
        return report, report
    findings = tuple(
        replace(finding, known=any(each.covers(finding) for each in baseline)) for finding in report.findings
    )
    covered = [finding for finding in findings if finding.known]
    new = tuple(finding for finding in findings if not finding.known)
    untested = {skipped.code for skipped in report.skipped}
    left = {(finding.code, _cause(finding)) for finding in report.findings}
    gone = [each for each in baseline if (each.code, each.cause) not in left and each.code not in untested]
    notes = list(report.notes)
    if covered:
        names = ", ".join(f"{finding.code} {finding.name} ({finding.severity.label})" for finding in covered)
        notes.append(f"in the baseline, so they do not count for the exit code: {names}")
    if gone:
        names = ", ".join(f"{each.code} {each.name}" for each in gone)
        notes.append(f"in the baseline and not found any more: {names}")
    # What is known was tested all the same.
    tested = (*report.clean, *((finding.code, finding.name) for finding in covered))
    return replace(report, findings=findings, notes=tuple(notes)), replace(report, findings=new, clean=tested)

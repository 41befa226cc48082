"""Results as a notebook shows them: small, without styles of their own, so that light and dark both look right."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rolloutdoctor.commands.compare import words as run_comparison
from rolloutdoctor.commands.diff import terminal as diff_terminal
from rolloutdoctor.commands.export.words import as_full
from rolloutdoctor.commands.identify import words as identification
from rolloutdoctor.commands.info import words as info
from rolloutdoctor.results.comparison import Comparison, Recomputed
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.identification import Identification
from rolloutdoctor.results.ledger import Why
from rolloutdoctor.results.run_comparison import RunComparison
from rolloutdoctor.results.run_info import RunInfo
from rolloutdoctor.views import why
from rolloutdoctor.views.audit_words import audit_line
from rolloutdoctor.views.concise import counts
from rolloutdoctor.views.style import Style, plain
from rolloutdoctor.views.verdict import verdict


def run_html(files: Sequence[str], trainer: str, rows: int, columns: Iterable[str], metrics: Iterable[str]) -> str:
    """Return whose run it is, how many rows and which columns it has, and what was logged."""
    return _template("notebook_run.html").render(
        files=files, trainer=trainer, rows=rows, columns=sorted(columns), metrics=sorted(metrics)
    )


def report_html(report: Report) -> str:
    """Return the verdict, a table of the findings, the audit and the coverage."""
    return _template("notebook_report.html").render(
        report=report, verdict=verdict(report), audit=audit_line(report.audit), counts=counts(report)
    )


def finding_html(finding: Finding) -> str:
    """Return one finding with its measures."""
    return _template("notebook_finding.html").render(finding=finding)


TEXT: dict[type, Callable[[Any, Style], str]] = {
    Report: lambda report, _: verdict(report),
    Finding: lambda finding, _: (
        f"{finding.code} {finding.name} ({finding.severity.label}): {plain(finding.headline, 2000)}"
    ),
    Comparison: diff_terminal.full,
    RunComparison: run_comparison.full,
    Identification: identification.text,
    Recomputed: as_full,
    RunInfo: info.as_text,
    Why: why.full,
}
"""Kind of a result to what prints it: as its command does, but for a report, which is its verdict."""


def text_of(result: object) -> str:
    """Return the text of a result."""
    return TEXT[type(result)](result, Style()).rstrip("\n")


def html_of(result: object) -> str:
    """Return the HTML of a result; what is columns of text stays so."""
    match result:
        case Report():
            return report_html(result)
        case Finding():
            return finding_html(result)
    return _template("notebook_text.html").render(text=text_of(result))


def _template(name: str) -> Template:
    templates = Environment(
        loader=PackageLoader("rolloutdoctor.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["plain"] = lambda words: plain(words, 2000)
    return templates.get_template(name)

"""Results as a notebook shows them: small, without styles of their own, so that light and dark both look right."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rolloutdoctor.results.comparison import Comparison, Recomputed
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.identification import Identification
from rolloutdoctor.results.ledger import Why
from rolloutdoctor.results.run_comparison import RunComparison
from rolloutdoctor.views import diff_terminal, identification, run_comparison, why
from rolloutdoctor.views.audit_words import audit_line
from rolloutdoctor.views.concise import counts
from rolloutdoctor.views.recompute_views import as_full
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


def _as_text(print_: Callable[[Any, Style], str]) -> Callable[[Any], str]:
    """Show a result as its command prints it."""
    return lambda found: _template("notebook_text.html").render(text=print_(found, Style()))


HTML: dict[type, Callable[[Any], str]] = {
    Report: report_html,
    Finding: finding_html,
    Comparison: _as_text(diff_terminal.full),
    RunComparison: _as_text(run_comparison.full),
    Identification: _as_text(identification.text),
    Recomputed: _as_text(as_full),
    Why: _as_text(why.full),
}
"""Kind of a result to what shows it."""


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

"""Results as a notebook shows them: small, without styles of their own, so that light and dark both look right."""

from collections.abc import Iterable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.views.audit_words import audit_line
from rolloutdoctor.views.concise import counts
from rolloutdoctor.views.style import plain
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


def text_html(text: str) -> str:
    """Return what a command prints, as it prints it."""
    return _template("notebook_text.html").render(text=text)


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

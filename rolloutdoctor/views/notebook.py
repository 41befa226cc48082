"""Results as a notebook shows them: small, without styles of their own, so that light and dark both look right."""

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.views.audit_words import audit_line
from rolloutdoctor.views.concise import counts
from rolloutdoctor.views.style import plain
from rolloutdoctor.views.verdict import verdict


def run_html(run: Run) -> str:
    """Return whose run it is, its rows and columns, and what was logged; nothing is read for it."""
    said = run.metadata
    trainer = f"{said.trainer} {said.trainer_version or ''}".strip() if said.trainer else "not stated in the file"
    return _template("notebook_run.html").render(run=run, trainer=trainer, metrics=sorted(run.metrics.names()))


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

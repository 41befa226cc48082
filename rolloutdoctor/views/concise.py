"""One line a finding, for logs and grep."""

from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.rule_pages import page_of
from rolloutdoctor.views.audit_words import audit_lines
from rolloutdoctor.views.layout import many
from rolloutdoctor.views.style import Style, plain


def render(report: Report, style: Style) -> str:
    """Render the audit, one line a finding, and what became of the other rules, one line each kind."""
    lines = [f"audit: {plain(line, 300)}" for line in audit_lines(report.audit)]
    lines += [
        f"{finding.severity.label} {finding.code} {finding.name} {standing(finding)}: {plain(finding.headline, 200)}"
        for finding in report.findings
    ]
    others = {
        "clean": [code for code, _ in report.clean],
        "not applicable": [entry.code for entry in report.not_applicable],
        "skipped": [entry.code for entry in report.skipped],
    }
    lines += [f"{kind}: {many(len(codes), 'rule')} ({' '.join(codes)})" for kind, codes in others.items() if codes]
    if report.findings:
        lines.append(f"rules: {page_of('CODE')} explains a finding")
    lines.append(f"{counts(report)}.")
    return "\n".join(lines) + "\n"


def counts(report: Report) -> str:
    """Count the rules that could be tested, what these found, and what became of the others.

    >>> from rolloutdoctor.results.findings import InputSummary
    >>> counts(Report("0.1.0", "cpu", "float32", InputSummary(), clean=(("RDI001", "nonfinite-values"),)))
    '1 of 1 rules tested: no findings, 1 clean; 0 not applicable, 0 skipped'
    """
    tested = report.coverage
    outcome = f"{len(report.findings)} found ({severities(report)})" if report.findings else "no findings"
    rest = f"{len(report.not_applicable)} not applicable, {len(report.skipped)} skipped"
    return f"{tested.tested} of {tested.rules} rules tested: {outcome}, {len(report.clean)} clean; {rest}"


def standing(finding: Finding) -> str:
    """The verdict on a finding, what it follows from, and whether a baseline has it."""
    follows = f", follows from {finding.follows_from}" if finding.follows_from else ""
    return finding.verdict + follows + (", in the baseline" if finding.known else "")


def severities(report: Report) -> str:
    """Count the findings of each kind, and those that follow from others of them."""
    labels = [finding.severity.label for finding in report.causes]
    parts = [
        f"{labels.count(label)} {label}{'s' if labels.count(label) != 1 and label != 'info' else ''}"
        for label in ("error", "warning", "info")
        if label in labels
    ]
    rest = len(report.findings) - len(labels)
    if rest:
        parts.append(f"{rest} consequence{'' if rest == 1 else 's'}")
    return ", ".join(parts) if parts else "no findings"

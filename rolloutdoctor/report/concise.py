"""One line a rule, for logs and grep."""

from rolloutdoctor.report.audit_words import audit_lines
from rolloutdoctor.report.style import Style, plain
from rolloutdoctor.results.findings import Report


def render(report: Report, style: Style) -> str:
    """Render the audit, findings, then skipped rules, one line each; a last line counts."""
    lines = [f"audit: {plain(line, 300)}" for line in audit_lines(report.audit)]
    lines += [
        f"{finding.severity.label} {finding.code} {finding.name} {finding.verdict}: {plain(finding.headline, 200)}"
        for finding in report.findings
    ]
    lines += [f"skipped {one.code} {one.name}: {plain(one.reason, 200)}" for one in report.skipped]
    lines.append(counts(report))
    return "\n".join(lines) + "\n"


def counts(report: Report) -> str:
    """How many findings of each kind, rules that are clean, and rules that were skipped."""
    severities = [finding.severity.label for finding in report.findings]
    parts = [
        f"{severities.count(label)} {label}{'s' if severities.count(label) != 1 and label != 'info' else ''}"
        for label in ("error", "warning", "info")
        if label in severities
    ]
    found = ", ".join(parts) if parts else "no findings"
    return f"{found}; {len(report.clean)} clean, {len(report.skipped)} skipped"

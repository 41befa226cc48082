"""Links from findings to the pictures that show them."""

from collections.abc import Collection

from rolloutdoctor.results.figures import KINDS
from rolloutdoctor.results.findings import Finding, Report, Severity


def picture_of(finding: Finding, drawn: Collection[str]) -> str | None:
    """Return the kind of the picture that shows a finding, of those that are drawn; None if none does."""
    kind = next((kind for kind, codes in KINDS.items() if finding.code.startswith(codes)), None)
    if finding.cause is not None and finding.cause.quantity == "kl":
        kind = "kl"
    return kind if kind in drawn else None


def top_picture(report: Report, drawn: Collection[str]) -> tuple[str, Finding] | None:
    """Return the kind of the picture of the top finding, and the finding; None if there is no such picture.

    It is the worst fault that has a picture; in a run without faults, the first finding that a fix answers.
    """
    for finding in report.findings:
        kind = picture_of(finding, drawn)
        if kind is not None and (finding.severity >= Severity.WARNING or finding.fix is not None):
            return kind, finding
    return None

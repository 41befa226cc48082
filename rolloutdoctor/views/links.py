"""Links from findings to the pictures that show them."""

from collections.abc import Collection

from rolloutdoctor.results.figures import KINDS
from rolloutdoctor.results.findings import Finding, Report, Severity


def picture_of(finding: Finding, drawn: Collection[str]) -> str | None:
    """Return the kind of the picture that shows a finding, of those that are drawn; None if none does."""
    kind = next((kind for kind, codes in KINDS.items() if finding.code.startswith(codes)), None)
    if finding.cause is not None:
        kind = "kl" if finding.cause.quantity == "kl" and "kl" in drawn else "audit"
    return kind if kind in drawn else None


def top_picture(report: Report, drawn: Collection[str]) -> tuple[str, Finding | None] | None:
    """Return the kind of the picture at the top, and the finding that it shows; None if there is no such picture.

    It is that of the worst fault that has one; of a run without faults what was logged, or how it compares.
    """
    faults = [finding for finding in report.findings if finding.severity >= Severity.WARNING]
    for finding in faults:
        kind = picture_of(finding, drawn)
        if kind is not None:
            return kind, finding
    return None if faults else next(((kind, None) for kind in ("overview", "audit") if kind in drawn), None)

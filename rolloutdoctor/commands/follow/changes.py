"""News of a report: each finding is reported once, and again only where its verdict changes for good."""

from collections.abc import Iterator
from dataclasses import dataclass

from rolloutdoctor.commands.follow.saved_state import Reported
from rolloutdoctor.results.findings import Finding, Report, Severity, weight_of

HOLDS_FOR = 16
"""Steps for which a finding has to be less than was said before that is said: verdicts at a threshold come and go."""


@dataclass(frozen=True)
class Change:
    """Something to say.

    Attributes:
        finding: it; None if it is gone.
        line: in words.
        is_new: True if it was not there before.
    """

    finding: Finding | None
    line: str
    is_new: bool


def key_of(finding: Finding) -> str:
    """Return the identity of a finding: the rule, and the cause that was established."""
    return finding.code if finding.cause is None else f"{finding.code} {finding.cause.hypothesis}"


def changes(report: Report, reported: dict[str, Reported], step: int, counted: int) -> Iterator[Change]:
    """Yield what is new in a report, and note it in `reported`.

    Args:
        report: what was found in all steps that were counted.
        reported: what was reported before.
        step: the last step that was counted.
        counted: how many were.
    """
    by_key = {key_of(finding): finding for finding in report.findings}
    for key, finding in by_key.items():
        before, now = reported.get(key), (finding.severity.label, finding.verdict)
        follows = f", follows from {finding.follows_from}" if finding.follows_from else ""
        words = f"{finding.code} {finding.name} {finding.verdict}{follows}: {finding.headline}"
        if before is None:
            reported[key] = Reported(*now)
            yield Change(finding, f"step {step}: {finding.severity.label} {words}", is_new=True)
        elif (before.severity, before.verdict) == now:
            before.since = None
        elif _weight(*now) > _weight(before.severity, before.verdict) or _is_settled(before, counted):
            reported[key] = Reported(*now)
            was = f"{before.severity}, {before.verdict}"
            yield Change(finding, f"step {step}: {finding.severity.label} {words} (was {was})", is_new=False)
    for key, before in reported.items():
        if key not in by_key and before.verdict != "gone" and _is_settled(before, counted):
            was = f"{before.severity}, {before.verdict}"
            reported[key] = Reported(before.severity, "gone")
            yield Change(None, f"step {step}: {key} is no longer found (was {was})", is_new=False)


def _weight(severity: str, verdict: str) -> tuple[int, bool]:
    return (0, False) if verdict == "gone" else weight_of(Severity[severity.upper()], verdict)


def _is_settled(before: Reported, counted: int) -> bool:
    """True once a finding has been below what was reported for some steps."""
    if before.since is None:
        before.since = counted
    return counted - before.since >= HOLDS_FOR

"""Wording of the audit: logged values that are reproduced, that are not, and that could not be compared."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rolloutdoctor.results.audit import AuditEntry

_LISTED = 6
"""Quantities that are named; more are counted."""


def audit_lines(audit: Sequence[AuditEntry]) -> Iterator[str]:
    """Yield the sentences of the audit; none if nothing was logged that can be compared with the rows."""
    compared = [entry for entry in audit if entry.compared]
    agreeing = [entry for entry in compared if entry.outcome == "intended" and not entry.with_fixes]
    if agreeing:
        yield f"{_counted(agreeing)} are reproduced from the rollouts and options"
    faulty = [entry for entry in compared if entry.outcome == "known fault"]
    for code in dict.fromkeys(entry.fault for entry in faulty):
        entries = [entry for entry in faulty if entry.fault == code]
        yield f"{_counted(entries)} are reproduced only with a fault that the release has ({code})"
    for fixes in dict.fromkeys(entry.with_fixes for entry in compared if entry.with_fixes):
        entries = [entry for entry in compared if entry.with_fixes == fixes]
        yield f"{_counted(entries)} are reproduced with the fix {', '.join(fixes)}: the run has it"
    differing = [entry for entry in compared if not entry.agrees]
    for entry in differing[:_LISTED]:
        yield _difference(entry)
    if len(differing) > _LISTED:
        names = ", ".join(entry.quantity for entry in differing[_LISTED:])
        yield f"nor are some values of {names}"
    for reason in dict.fromkeys(entry.reason for entry in audit if entry.not_compared):
        entries = [entry for entry in audit if entry.not_compared and entry.reason == reason]
        names = ", ".join(entry.quantity for entry in entries[:_LISTED])
        more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
        yield f"not compared: {names}{more} ({reason})"


def audit_line(audit: Sequence[AuditEntry]) -> str:
    """The audit in one sentence; empty if no logged value could be compared with the rows."""
    compared = [entry for entry in audit if entry.compared]
    differing = [entry for entry in compared if not entry.agrees]
    if not differing:
        faulty = any(entry.outcome == "known fault" for entry in compared)
        return "; ".join(_of_agreeing(compared)) if faulty else next(audit_lines(audit), "") if compared else ""
    values = sum(entry.agree for entry in compared)
    names = ", ".join(_named(entry) for entry in differing[:_LISTED])
    more = f" and {len(differing) - _LISTED} more" if len(differing) > _LISTED else ""
    total = sum(entry.compared for entry in compared)
    return (
        f"{values:,} of {total:,} logged values are reproduced from the rollouts and options; not all of {names}{more}"
    )


def _of_agreeing(compared: Sequence[AuditEntry]) -> Iterator[str]:
    """Yield what is reproduced as it is meant, and what only with a fault."""
    yield from audit_lines([replace(entry, not_compared=0) for entry in compared])


def _counted(entries: Sequence[AuditEntry]) -> str:
    """Counts of the first quantity of each of the first stages by name, and of the others together."""
    named = list({entry.stage: entry for entry in reversed(entries) if entry.stage != "metrics"}.values())[::-1]
    named = named or list(entries[:1])
    others = [entry for entry in entries if entry not in named]
    words = [f"{entry.agree:,} of {entry.compared:,} {_named(entry)}" for entry in named]
    if others:
        values = sum(entry.agree for entry in others)
        words.append(f"{values:,} values of {len(others)} other {'metric' if len(others) == 1 else 'metrics'}")
    return ", ".join(words)


def _named(entry: AuditEntry) -> str:
    return entry.quantity if entry.window == 1 else f"{entry.quantity} (means over {entry.window} steps)"


def _difference(entry: AuditEntry) -> str:
    text = f"{entry.compared - entry.agree:,} of {entry.compared:,} {_named(entry)} are not"
    if entry.first is not None:
        row = f", row {entry.first.sample_id}" if entry.first.sample_id else ""
        text += (
            f": step {entry.first.step}{row} logged {entry.first.logged:.7g}, the rows give "
            f"{entry.first.recomputed:.7g}"
        )
    return text

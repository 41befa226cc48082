"""What came out of each of several runs, in a line, and of all of them."""

from collections import Counter

from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.views.layout import many
from rolloutdoctor.views.log_outcome import before_the_rules, is_too_little
from rolloutdoctor.views.style import plain


def outcome(run: CheckedRun) -> str:
    """The worst of a run, in a word.

    >>> outcome(CheckedRun("a", ("a",), None, "no such file"))
    'unreadable'
    """
    if run.report is None:
        return "unreadable"
    if run.report.nothing_checked:
        return "untested"
    worst = run.report.worst()
    if worst is not None and worst >= Severity.WARNING:
        return worst.label
    return "too little to judge" if is_too_little(run.report) else "no fault"


def total(counts: Counter[str]) -> str:
    """Say how many runs have which outcome, the worst first.

    >>> total(Counter({"no fault": 2, "error": 1}))
    '3 runs: 1 with errors, 2 without a fault.'
    """
    words = [
        f"{counts[kind]:,} {words}"
        for kind, words in (
            ("unreadable", "unreadable"),
            ("error", "with errors"),
            ("warning", "with warnings"),
            ("untested", "untested"),
            ("too little to judge", "with too little to judge"),
            ("no fault", "without a fault"),
        )
        if kind in counts
    ]
    return f"{many(counts.total(), 'run')}: {', '.join(words)}."


def words_of(run: CheckedRun) -> str:
    """The headline of the worst fault, and the codes of the others."""
    if run.report is None:
        return plain(run.error, 300)
    parts = []
    faults = [finding for finding in run.report.causes if finding.severity >= Severity.WARNING]
    if faults:
        parts.append(f"{faults[0].code} {plain(faults[0].headline, 200)}")
    if faults[1:]:
        parts.append(f"also {', '.join(finding.code for finding in faults[1:])}")
    below = [
        finding for finding in run.report.findings if finding.follows_from and finding.severity >= Severity.WARNING
    ]
    for cause in dict.fromkeys(finding.follows_from for finding in below):
        codes = [finding.code for finding in below if finding.follows_from == cause]
        parts.append(f"{', '.join(codes)} {'follows' if len(codes) == 1 else 'follow'} from {cause}")
    size = run.report.input
    words = "; ".join(parts) or "; ".join([*_came(run.report), _tested(run.report)])
    rows = "" if run.report.is_log_alone else f"{many(size.rows, 'row')}, "
    return f"{words} ({rows}{many(size.steps, 'step')})"


def _came(report: Report) -> list[str]:
    """What came of a run without faults, first of all."""
    sentence = next(before_the_rules(report), "") if report.is_log_alone else ""
    return [sentence[:1].lower() + sentence[1:].rstrip(".")] if sentence else []


def _tested(report: Report) -> str:
    """Say how many rules were tested, or why none of them applies."""
    reasons = {rule.reason for rule in report.not_applicable}
    if not report.testable and not report.skipped and len(reasons) == 1:
        return reasons.pop()
    return f"{report.coverage.tested} of {report.testable} rules tested"

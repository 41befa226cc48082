"""Which finding follows from which: a cause comes first and counts for what follows from it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rolloutdoctor.audit.tally import STAGES
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.rules.base import Context

Condition = Callable[[Finding, Finding, Context], bool]
"""Tells of a cause and another finding whether the second follows from the first."""

AUDIT = {"RDA004": STAGES[:1], "RDG005": STAGES[1:3], "RDM004": STAGES[3:]}
"""Code of a rule that reports what no hypothesis explains, and the stages of the audit that it reports."""


def _always(cause: Finding, found: Finding, context: Context) -> bool:
    return True


def _is_error(cause: Finding, found: Finding, context: Context) -> bool:
    """The same logged advantages; what is less than an error is about others."""
    return found.severity is Severity.ERROR


def _unexplained(found: Finding, context: Context) -> set[str]:
    return {name for name, tally in context.unexplained.items() if tally.stage in AUDIT[found.code]}


def _of_hypothesis(cause: Finding, found: Finding, context: Context) -> bool:
    """The hypothesis of the cause explains values of every quantity in question."""
    if cause.cause is None or found.cause is not None:
        return False
    return _unexplained(found, context) <= {*cause.cause.explains}


ANY = "any rule"

FOLLOWS: tuple[tuple[str, tuple[str, ...], Condition], ...] = (
    (ANY, tuple(AUDIT), _of_hypothesis),
    ("RDI007", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDI006", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDA004", ("RDA003", "RDA006", "RDA007"), _is_error),
    ("RDM007", ("RDM001",), _always),
    ("RDI008", ("RDO001", "RDO006", "RDM003", "RDG005", "RDM001"), _always),
    ("RDO006", ("RDO003",), _always),
    ("RDO003", ("RDO002", "RDO001"), _always),
    ("RDO004", ("RDO001",), _always),
    ("RDO011", ("RDO001",), _always),
    ("RDO009", ("RDO002", "RDO001"), _always),
    ("RDO010", ("RDO002", "RDO001"), _always),
    ("RDO002", ("RDO001",), _always),
    ("RDI005", ("RDO001",), _always),
)
"""Code of a cause, codes of what may follow from it, and when: of several causes the first here is named."""


def _cause_of(found: Finding, findings: Sequence[Finding], context: Context) -> str | None:
    """Code of the cause of a finding; None if it has none, or only one that weighs less."""
    for code, follows, holds in FOLLOWS:
        for cause in findings if found.code in follows else ():
            is_it = code in (cause.code, ANY) and cause.code != found.code
            if is_it and _stands_for(cause, found) and holds(cause, found, context):
                return cause.code
    return None


def _stands_for(cause: Finding, found: Finding) -> bool:
    """A cause that weighs less would hide what follows from it: it counts alone then. Information counts nowhere."""
    return found.severity is Severity.INFO or cause.weight >= found.weight


def by_cause(findings: Sequence[Finding], context: Context) -> tuple[Finding, ...]:
    """Return the findings with their causes: the worst first, each followed by what follows from it.

    Args:
        findings: of a run.
        context: what is known of it.
    """
    # Of equal weight what names a cause comes before what only says that values disagree.
    worst_first = sorted(
        findings,
        key=lambda found: ([-each for each in found.weight], found.code in AUDIT and found.cause is None, found.code),
    )
    told = [replace(found, follows_from=_cause_of(found, worst_first, context)) for found in worst_first]

    def below(code: str | None) -> Iterator[Finding]:
        for found in told:
            if found.follows_from == code:
                yield found
                yield from below(found.code)

    return tuple(below(None))

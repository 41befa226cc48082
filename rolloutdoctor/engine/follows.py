"""Causal order of findings: a cause comes first and counts for what follows from it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from rolloutdoctor.audit.tally import STAGES
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.rules.base import Context

Condition = Callable[[Finding, Finding, Context], bool]
"""Predicate of a cause and another finding: the second follows from the first."""

AUDIT = {"RDA004": STAGES[:1], "RDG005": STAGES[1:3], "RDM004": STAGES[3:]}
"""Code of a rule that reports what no hypothesis explains, and the stages of the audit that it reports."""


def _always(cause: Finding, found: Finding, context: Context) -> bool:
    return True


def _is_error(cause: Finding, found: Finding, context: Context) -> bool:
    """The same logged advantages; what is less than an error is about others."""
    return found.severity is Severity.ERROR and not _all_of_rows(found, cause, context)


def _all_of_rows(cause: Finding, found: Finding, context: Context) -> bool:
    """Tokens with another advantage than their row's are all that is off: every such row disagrees."""
    if cause.code != "RDA006" or found.cause is not None or _unexplained(found, context) != {"advantages"}:
        return False
    measures = cause.measures
    rows = sum(int(measures[name].value or 0) for name in ("rows", "dead_rows") if name in measures)
    return context.unexplained["advantages"].disagree == rows


def _unexplained(found: Finding, context: Context) -> set[str]:
    return {name for name, tally in context.unexplained.items() if tally.stage in AUDIT[found.code]}


def _of_hypothesis(cause: Finding, found: Finding, context: Context) -> bool:
    """The hypothesis of the cause explains values of every quantity in question."""
    if cause.cause is None or found.cause is not None:
        return False
    return _unexplained(found, context) <= {*cause.cause.explains}


def _is_of_kl_metric(cause: Finding, found: Finding, context: Context) -> bool:
    """Nothing but the KL metric disagrees."""
    metrics = () if context.trainer is None else context.trainer.log.kl
    return found.cause is None and _unexplained(found, context) <= {*metrics}


def _began_earlier(cause: Finding, found: Finding, context: Context) -> bool:
    """The cause is as heavy and began no later, where both say when."""
    begun, later = cause.onset, found.onset
    return cause.severity >= found.severity and (begun is None or later is None or begun <= later)


def _of_same_names(cause: Finding, found: Finding, context: Context) -> bool:
    """The cause changes a metric of the identity that fails, or refutes an option in it."""
    if cause.code in AUDIT and cause.cause is None:
        names = _unexplained(cause, context)
    else:
        names = set() if cause.cause is None else {*cause.cause.explains}
    if cause.code == "RDI014":
        names = {one.option.rpartition(".")[2] for one in context.refuted}
    return not names.isdisjoint(found.headline.split())


def _is_of_lag(cause: Finding, found: Finding, context: Context) -> bool:
    """What is found goes by the stamps alone: no step from which on the gap is larger."""
    return found.measures["onset_step"].value is None


def _is_of_a_place(cause: Finding, found: Finding, context: Context) -> bool:
    """A step of the one is among the worst of the other."""
    return not {one.step for one in cause.examples}.isdisjoint(one.step for one in found.examples)


ANY = "any rule"

FOLLOWS: tuple[tuple[str, tuple[str, ...], Condition], ...] = (
    (ANY, tuple(AUDIT), _of_hypothesis),
    (ANY, ("RDM008",), _of_same_names),
    ("RDO012", ("RDT004",), _began_earlier),
    ("RDT009", ("RDT001", "RDT005", "RDG002", "RDG003"), _began_earlier),
    ("RDT002", ("RDT001", "RDG002", "RDG003"), _began_earlier),
    ("RDT006", ("RDT001", "RDI012", "RDG003"), _began_earlier),
    ("RDT003", ("RDT001", "RDT006", "RDI012", "RDG003", "RDT008"), _began_earlier),
    ("RDT004", ("RDI012", "RDT006", "RDT008"), _began_earlier),
    ("RDT005", ("RDI012",), _began_earlier),
    ("RDT001", ("RDT005", "RDG002", "RDG003"), _began_earlier),
    ("RDT003", ("RDA017",), _always),
    ("RDT008", ("RDG014",), _is_of_a_place),
    ("RDO016", ("RDG014",), _is_of_a_place),
    ("RDA006", ("RDA004",), _all_of_rows),
    ("RDI007", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDI006", ("RDG005", "RDM004", "RDA001"), _always),
    ("RDI004", ("RDA015",), _always),
    ("RDA004", ("RDA003", "RDA006", "RDA007"), _is_error),
    ("RDM007", ("RDM001",), _always),
    ("RDM001", ("RDG005",), _is_of_kl_metric),
    ("RDI008", ("RDO001", "RDO006", "RDM003", "RDG005", "RDM001"), _always),
    ("RDO006", ("RDO003", "RDO015"), _always),
    ("RDA020", ("RDA011",), _always),
    ("RDG015", ("RDG011",), _always),
    ("RDI017", ("RDO002",), _is_of_lag),
    ("RDO003", ("RDO002", "RDO001"), _always),
    ("RDO004", ("RDO001",), _always),
    ("RDO008", ("RDO001",), _always),
    ("RDO011", ("RDO001",), _always),
    ("RDO009", ("RDO002", "RDO001"), _always),
    ("RDO010", ("RDO002", "RDO001"), _always),
    ("RDO013", ("RDO001", "RDO011"), _always),
    ("RDO014", ("RDO002", "RDO001", "RDO012"), _always),
    ("RDO002", ("RDO001",), _always),
    ("RDI005", ("RDO001",), _always),
)
"""Code of a cause, codes of what may follow from it, and when: of several causes the first here is named."""


def _causes_of(found: Finding, findings: Sequence[Finding], context: Context) -> Iterator[Finding]:
    """Yield the possible causes of a finding, whatever their weight. Information is the cause of information alone."""
    for code, follows, holds in FOLLOWS:
        for cause in findings if found.code in follows else ():
            counts = found.severity is Severity.INFO or cause.severity > Severity.INFO
            if code in (cause.code, ANY) and cause.code != found.code and counts and holds(cause, found, context):
                yield cause


def _follows_from(found: Finding, causes: Iterable[Finding]) -> str | None:
    """Code of the cause of a finding; None if it has none, or only one that weighs less: that would hide it."""
    is_info = found.severity is Severity.INFO
    return next((cause.code for cause in causes if is_info or cause.weight >= found.weight), None)


def by_cause(findings: Sequence[Finding], context: Context) -> tuple[Finding, ...]:
    """Return the findings with their causes: the worst first, each followed by what follows from it."""
    findings = sorted(findings, key=lambda found: ([-each for each in found.weight], found.code))
    causes = {found.code: list(_causes_of(found, findings, context)) for found in findings}
    linked = [replace(found, follows_from=_follows_from(found, causes[found.code])) for found in findings]
    # A confirmed cause that weighs less than what it explains comes before it, and hides nothing.
    heaviest = {found.code: found.weight for found in findings}
    for found in findings:
        for cause in causes[found.code]:
            if cause.verdict == "confirmed":
                heaviest[cause.code] = max(heaviest[cause.code], found.weight)

    def place(found: Finding) -> tuple[object, ...]:
        """Sort key: of equal weight what explains others is first, then what logged values name, and last the audit's.

        Of several that say when they began the earliest is first.
        """
        lighter = heaviest[found.code] == found.weight
        is_bare = found.cause is None
        audited = found.code in AUDIT and is_bare
        onset = inf if found.onset is None else found.onset
        return [-each for each in heaviest[found.code]], lighter, is_bare, audited, onset, found.code

    linked.sort(key=place)

    def below(code: str | None) -> Iterator[Finding]:
        for found in linked:
            if found.follows_from == code:
                yield found
                yield from below(found.code)

    return tuple(below(None))

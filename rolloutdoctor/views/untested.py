"""Rules that were not tested, together where one remedy, or one reason, is that of several."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rolloutdoctor.results.findings import NO_REMEDY, NotApplicable, Skipped


def best_remedy(skipped: Iterable[Skipped]) -> tuple[str, int] | None:
    """Return the one thing that would make most of the rules run, and how many; None if nothing would."""
    remedies = Counter(entry.remedy for entry in skipped if entry.remedy and entry.remedy != NO_REMEDY)
    return max(remedies.items(), key=lambda pair: (pair[1], pair[0]), default=None)


def by_remedy(skipped: Iterable[Skipped]) -> Iterator[tuple[str, str, str]]:
    """Yield who was skipped, why, and what would make it run, the remedy of most rules first.

    Why is empty where the rules of one remedy lack different things. A remedy that asks for more than another one
    comes behind it, and says only what more.
    """
    ordered = sorted(skipped, key=lambda entry: (entry.remedy, entry.code))
    groups = {remedy: list(rules) for remedy, rules in groupby(ordered, key=lambda entry: entry.remedy)}
    base_of = {
        remedy: min((other for other in groups if other and remedy.startswith(f"{other}, ")), key=len, default=remedy)
        for remedy in groups
    }

    def place(remedy: str) -> tuple[object, ...]:
        base = base_of[remedy]
        first = (-len(groups[base]), groups[base][0].code)
        return (*first, remedy != base, -len(groups[remedy]), groups[remedy][0].code)

    for remedy in sorted(groups, key=place):
        rules, base = groups[remedy], base_of[remedy]
        reasons = {entry.reason for entry in rules}
        shown = remedy if remedy == base else f"the same{remedy.removeprefix(base)}"
        yield named([(entry.code, entry.name) for entry in rules]), reasons.pop() if len(reasons) == 1 else "", shown


def by_reason(rules: Iterable[NotApplicable]) -> Iterator[tuple[str, str]]:
    """Yield which rules do not apply, and why, in the order of their codes."""
    ordered = sorted(rules, key=lambda entry: (entry.reason, entry.code))
    groups = [(reason, list(members)) for reason, members in groupby(ordered, key=lambda entry: entry.reason)]
    for reason, members in sorted(groups, key=lambda group: group[1][0].code):
        yield named([(entry.code, entry.name) for entry in members]), reason


def named(rules: Sequence[tuple[str, str]], most: int = 3) -> str:
    """Name up to so many rules; more of them by their codes, and runs of codes by their ends.

    >>> named([("RDA001", "rejected-in-baseline")])
    'RDA001 rejected-in-baseline'
    >>> named([(f"RDA00{n}", "x") for n in (1, 2, 3, 5, 7, 8)])
    '6 rules (RDA001-003, RDA005, RDA007-008)'
    """
    if len(rules) <= most:
        return ", ".join(f"{code} {name}" for code, name in rules)
    return f"{len(rules)} rules ({', '.join(_runs([code for code, _ in rules]))})"


def _runs(codes: Sequence[str]) -> Iterator[str]:
    """Codes that follow each other as their ends, such as RDA001-003."""
    parts = [(code.rstrip("0123456789"), code) for code in codes]
    for (family, _), run in groupby(
        enumerate(parts), key=lambda pair: (pair[1][0], int(pair[1][1][len(pair[1][0]) :] or 0) - pair[0])
    ):
        run_codes = [code for _, (_, code) in run]
        yield run_codes[0] if len(run_codes) == 1 else f"{run_codes[0]}-{run_codes[-1].removeprefix(family)}"

"""What a check made of a labelled run, and tables of it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

AUDIT = {"RDA004", "RDG005", "RDM004", "RDI014"}
"""Rules that say that something logged does not follow; RDI014 names an option, the others name with a cause alone."""

NAMED, ALSO, OTHER, ONLY_AUDIT = "named first", "named later", "other name", "audit only"
INFORMATION, SKIPPED, NOT_TESTED, MISSED, REFUSED = "information", "skipped", "not tested", "missed", "refused"
BELOW = "below its bound"
ACCUSED, SILENT = "accused", "silent"
OUTCOMES = (NAMED, ALSO, OTHER, ONLY_AUDIT, INFORMATION, SKIPPED, NOT_TESTED, BELOW, MISSED, REFUSED)
CLEAN_OUTCOMES = (SILENT, ACCUSED, REFUSED)
STRENGTHS = ("weak", "middle", "strong")


@dataclass(frozen=True)
class Checked:
    """A run after a check.

    Attributes:
        family: "trl", "verl", "slime", "rows" or "agents".
        name: of the kind, or of the clean run.
        strength: "weak", "middle", "strong" or "clean".
        expected: codes that name it; none for a clean run.
        outcome: one of `OUTCOMES`, or of `CLEAN_OUTCOMES`.
        found: codes of the warnings and errors, in the order of the report; with a cause "CODE cause".
        clean_beside: the run is not named, and an expected rule stands under clean.
        seconds: of the check.
        said: of a run that was refused: why.
    """

    family: str
    name: str
    strength: str
    expected: Sequence[str]
    outcome: str
    found: Sequence[str]
    clean_beside: bool
    seconds: float
    said: str = ""

    @property
    def key(self) -> str:
        """What it is called in a list."""
        return f"{self.name}, {self.strength}"

    def as_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def matches(finding: Mapping[str, Any], expected: Sequence[str]) -> bool:
    """Whether a finding names the fault; a rule of the audit does so with a cause alone."""
    return finding["code"] in expected and (finding["code"] not in AUDIT - {"RDI014"} or "cause" in finding)


def words(finding: Mapping[str, Any]) -> str:
    """Code and cause."""
    return finding["code"] + (f" {finding['cause']['hypothesis']}" if "cause" in finding else "")


def outcome(report: Mapping[str, Any], expected: Sequence[str], information: bool = False) -> str:
    """What became of a fault, from the JSON report."""
    loud = [each for each in report["findings"] if each["severity"] != "info"]
    named = [each for each in report["findings"] if matches(each, expected)]
    if loud and matches(loud[0], expected):
        return NAMED
    if named and information and not loud:
        return NAMED
    if any(each in loud for each in named) or (named and information):
        return ALSO
    if loud:
        return ONLY_AUDIT if {each["code"] for each in loud} <= AUDIT else OTHER
    if named:
        return INFORMATION
    if set(expected) & set(report["clean"]):
        return MISSED
    if set(expected) & {each["code"] for each in report["skipped"]}:
        return SKIPPED
    return NOT_TESTED


def judged(
    report: Mapping[str, Any],
    expected: Sequence[str],
    information: bool,
    true: Iterable[str],
    planted: float | None = None,
) -> dict[str, Any]:
    """The outcome, what was found, and whether an expected rule is clean beside an unnamed fault.

    Args:
        report: the JSON report.
        expected: codes that name the fault; none: the run is clean.
        information: a finding that is information alone names it, too.
        true: codes of what holds of the trainer itself, and is no false accusation.
        planted: size of the fault in the unit of the rule's bound, where it is known.
    """
    loud = [each for each in report["findings"] if each["severity"] != "info" and each["code"] not in set(true)]
    found = [words(each) for each in loud]
    if not expected:
        return {"outcome": ACCUSED if loud else SILENT, "found": found, "clean_beside": False}
    named = outcome(
        {**report, "findings": [each for each in report["findings"] if each["code"] not in set(true) - set(expected)]},
        expected,
        information,
    )
    beside = named not in (NAMED, ALSO, INFORMATION) and bool(set(expected[:1]) & set(report["clean"]))
    bounds = [one["bound"] for one in report.get("excluded", ()) if one["code"] in expected[:1]]
    if named == MISSED and planted is not None and any(bound >= planted for bound in bounds):
        # What the report excludes is larger than what was planted.
        return {"outcome": BELOW, "found": found, "clean_beside": False}
    return {"outcome": named, "found": found, "clean_beside": beside}


def totals(runs: Sequence[Checked]) -> dict[str, dict[str, int]]:
    """Counts of faults and clean runs by outcome, and by family."""
    faults = [run for run in runs if run.expected]
    found: dict[str, dict[str, int]] = {}
    for title, part in (
        ("faults", faults),
        *((f"faults {name}", [r for r in faults if r.strength == name]) for name in STRENGTHS),
    ):
        counts = Counter(run.outcome for run in part)
        found[title] = {"runs": len(part), **{name: counts[name] for name in OUTCOMES}}
        found[title]["clean beside an unnamed cause"] = sum(run.clean_beside for run in part)
    for family in dict.fromkeys(run.family for run in runs):
        part = [run for run in runs if not run.expected and run.family == family]
        if part:
            counts = Counter(run.outcome for run in part)
            found[f"clean {family}"] = {"runs": len(part), **{name: counts[name] for name in CLEAN_OUTCOMES}}
    return found


def accusations(runs: Sequence[Checked]) -> list[tuple[str, int, str]]:
    """Of clean runs: code, how often it accuses, and one of the runs."""
    counts: Counter[str] = Counter()
    seen: dict[str, str] = {}
    for run in runs:
        if not run.expected:
            for code in {each.split()[0] for each in run.found}:
                counts[code] += 1
                seen.setdefault(code, f"{run.family} {run.name}")
    return [(code, count, seen[code]) for code, count in counts.most_common()]


def page(runs: Sequence[Checked], words_of: Mapping[str, str]) -> str:
    """The text of tests/lab/labelled/results.md."""
    whole = totals(runs)
    lines = [
        "# Labelled runs",
        "",
        "`make labelled` makes these runs, checks them and writes this file. Each fault is a bug in the trainer: TRL's",
        "source is edited before a real training of a tiny model; verl's and slime's own functions get wrong inputs.",
        "Runs named `rows` are drawn from a synthetic model. The outcome of a fault is one of these:",
        "",
        "- named first: the right rule is the first warning or error of the report; named later: it is a later one;",
        "- other name: only other rules warn; audit only: the report says that logged values are not reproduced, but",
        "  not why;",
        "- information: the right rule reports the fault, but as information;",
        "- skipped: the right rule was skipped; not tested: it was not applicable;",
        "- missed: the right rule is clean, and no other rule warns; below its bound: the same, but the report",
        "  excludes only effects larger than the planted one;",
        "- refused: the run could not be read.",
        "",
        "A clean run is silent without warnings and errors, else accused. The last column of the first table counts",
        "faults that were not named although the right rule was called clean.",
        "",
        "| runs | " + " | ".join(["runs", *OUTCOMES, "clean beside an unnamed cause"]) + " |",
        "| --- |" + " ---: |" * (len(OUTCOMES) + 2),
    ]
    lines += [
        f"| {title} | {' | '.join(map(str, row.values()))} |" for title, row in whole.items() if "faults" in title
    ]
    lines += ["", "| clean runs | runs | silent | accused | refused |", "| --- | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {title.removeprefix('clean ')} | {' | '.join(map(str, row.values()))} |"
        for title, row in whole.items()
        if title.startswith("clean")
    ]
    accused = accusations(runs)
    lines += ["", *[f"- {code} accuses {count}, as {example}" for code, count, example in accused]] if accused else []
    lines += ["", "| fault | rule | strength | weak | middle | strong |", "| --- | --- | --- | --- | --- | --- |"]
    kinds: dict[str, dict[str, Checked]] = {}
    for run in runs:
        if run.expected:
            kinds.setdefault(run.name, {})[run.strength] = run
    for name, by_strength in kinds.items():
        cells = [_cell(by_strength[each]) if each in by_strength else "" for each in STRENGTHS]
        one = next(iter(by_strength.values()))
        lines.append(f"| {name} | {one.expected[0]} | {words_of.get(name, '')} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(run: Checked) -> str:
    if run.outcome in (NAMED, INFORMATION, BELOW, MISSED, SKIPPED, NOT_TESTED, REFUSED):
        return run.outcome
    codes = ", ".join(dict.fromkeys(each.split()[0] for each in run.found[:2]))
    return f"{run.outcome} ({codes})"


def changes(before: Sequence[Checked], after: Sequence[Checked]) -> list[str]:
    """A line for each run whose outcome or findings differ."""
    old = {run.key: run for run in before}
    return [
        f"{run.family} {run.key}: {old[run.key].outcome} {list(old[run.key].found)} -> {run.outcome} {list(run.found)}"
        for run in after
        if run.key in old and (run.outcome, [*run.found]) != (old[run.key].outcome, [*old[run.key].found])
    ]

"""Several runs, one line each, and a total: written as they are checked, none of them is kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from tempfile import TemporaryFile

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.views.layout import as_text, hanging, many
from rolloutdoctor.views.markup import inert
from rolloutdoctor.views.structured import SCHEMA_VERSION, body
from rolloutdoctor.views.style import COLORS, Style, plain
from rolloutdoctor.views.terminal import render

Runs = Iterable[tuple[CheckedRun, int]]
"""Runs, each with its exit code."""


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
    return worst.label if worst is not None and worst >= Severity.WARNING else "no fault"


def total(found: Counter[str]) -> str:
    """Say how many runs have which outcome, the worst first.

    >>> total(Counter({"no fault": 2, "error": 1}))
    '3 runs: 1 with errors, 2 without a fault.'
    """
    words = [
        f"{found[kind]:,} {words}"
        for kind, words in (
            ("unreadable", "unreadable"),
            ("error", "with errors"),
            ("warning", "with warnings"),
            ("untested", "untested"),
            ("no fault", "without a fault"),
        )
        if kind in found
    ]
    return f"{many(found.total(), 'run')}: {', '.join(words)}."


def _words(run: CheckedRun) -> str:
    """The headline of the worst fault, and the codes of the others."""
    if run.report is None:
        return plain(run.error, 300)
    parts = []
    faults = [finding for finding in run.report.causes if finding.severity >= Severity.WARNING]
    if faults:
        parts.append(f"{faults[0].code} {plain(faults[0].headline, 200)}")
    if faults[1:]:
        parts.append(f"also {', '.join(finding.code for finding in faults[1:])}")
    below = [one for one in run.report.findings if one.follows_from and one.severity >= Severity.WARNING]
    for cause in dict.fromkeys(one.follows_from for one in below):
        codes = [one.code for one in below if one.follows_from == cause]
        parts.append(f"{', '.join(codes)} {'follows' if len(codes) == 1 else 'follow'} from {cause}")
    size = run.report.input
    words = "; ".join(parts) or f"{run.report.coverage.tested} of {run.report.testable} rules tested"
    return f"{words} ({many(size.rows, 'row')}, {many(size.steps, 'step')})"


def full(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one line for each run, its whole report with -v, and the total."""
    width = min(max((len(plain(name, 60)) for name in names), default=0) + 2, style.width // 2)
    found = Counter[str]()
    with TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="\n") as reports:
        for run, code in runs:
            found[outcome(run)] += 1
            if not style.quiet:
                yield as_text([_line(run, code, width, style)], style)
            if style.verbose and run.report is not None:
                title = Text(plain(run.name, 200), style="bold" if style.color else "")
                whole = Text.from_ansi(render(run.report, style).rstrip("\n"))
                reports.write(as_text(["", title, whole], style))
            del run
        reports.seek(0)
        yield from reports
    if style.verbose:
        yield "\n"
    yield as_text([Text(total(found), style="bold" if style.color else "")], style)


def _line(run: CheckedRun, code: int, width: int, style: Style) -> RenderableType:
    kind = outcome(run)
    color = {"error": COLORS[Severity.ERROR], "warning": COLORS[Severity.WARNING], "unreadable": "bold red"}
    words = Text.assemble((f"{kind:<11}", color.get(kind, "green") if style.color else ""), f"{code}  {_words(run)}")
    name = plain(run.name, 60)
    return hanging(Text(name if len(name) < width else f"...{name[4 - width :]}"), words, width)


def concise(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one line for each run, without a width."""
    found = Counter[str]()
    for run, code in runs:
        found[outcome(run)] += 1
        line = f"{plain(run.name, 200)}: {outcome(run)} {code}: {_words(run)}\n"
        yield line if style.unicode else line.encode("ascii", "replace").decode()
        del run
    yield total(found) + "\n"


def as_markdown(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render a table."""
    found = Counter[str]()
    yield "| run | outcome | exit code | findings |\n| --- | --- | ---: | --- |\n"
    for run, code in runs:
        found[outcome(run)] += 1
        line = f"| {inert(plain(run.name, 200))} | {outcome(run)} | {code} | {inert(_words(run))} |\n"
        yield line if style.unicode else line.encode("ascii", "xmlcharrefreplace").decode()
        del run
    yield f"\n{total(found)}\n"


def as_json(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one JSON object with a report for each run."""
    yield f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "runs": ['
    comma = ""
    for run, code in runs:
        text = json_text(_body(run, code), indent=2, ascii_only=not style.unicode)
        del run
        # Strings of JSON have no line break of their own.
        yield comma + "\n    " + text.replace("\n", "\n    ")
        comma = ","
    yield "\n  ]\n}\n"


def as_json_lines(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one JSON object a line, a run each."""
    for run, code in runs:
        yield json_text(_body(run, code), ascii_only=not style.unicode) + "\n"
        del run


def _body(run: CheckedRun, code: int) -> dict[str, object]:
    return {
        "name": run.name,
        "files": list(run.files),
        "outcome": outcome(run),
        "exit_code": code,
        "error": run.error or None,
        "report": None if run.report is None else body(run.report),
    }


RENDERERS: dict[str, Callable[[Runs, Sequence[str], Style], Iterator[str]]] = {
    "full": full,
    "concise": concise,
    "json": as_json,
    "jsonl": as_json_lines,
    "markdown": as_markdown,
}
"""Format to what renders runs, given with the names of all of them, in pieces of whole lines."""

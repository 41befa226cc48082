"""Several runs, one line each, and a total: written as they are checked, none of them is kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from tempfile import TemporaryFile

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.views.layout import as_text, hanging
from rolloutdoctor.views.markup import inert
from rolloutdoctor.views.run_line import outcome, total, words_of
from rolloutdoctor.views.structured import SCHEMA_VERSION, body
from rolloutdoctor.views.style import COLORS, Style, plain
from rolloutdoctor.views.terminal import render

Runs = Iterable[tuple[CheckedRun, int]]
"""Runs, each with its exit code."""


def full(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one line for each run, its whole report with -v, and the total."""
    width = min(max((len(plain(name, 60)) for name in names), default=0) + 2, style.width // 2)
    outcomes = Counter[str]()
    with TemporaryFile("w+", encoding="utf-8", errors="surrogatepass", newline="\n") as reports:
        for run, code in runs:
            outcomes[outcome(run)] += 1
            if not style.quiet:
                yield as_text([_line(run, code, width, style)], style)
            if style.verbose and run.report is not None:
                title = Text(plain(run.name, 200), style="bold" if style.color else "")
                report_text = Text.from_ansi(render(run.report, style).rstrip("\n"))
                reports.write(as_text(["", title, report_text], style))
            del run
        reports.seek(0)
        yield from reports
    if style.verbose:
        yield "\n"
    yield as_text([Text(total(outcomes), style="bold" if style.color else "")], style)


def _line(run: CheckedRun, code: int, width: int, style: Style) -> RenderableType:
    kind = outcome(run)
    color = {"error": COLORS[Severity.ERROR], "warning": COLORS[Severity.WARNING], "unreadable": "bold red"}
    words = Text.assemble((f"{kind:<11}", color.get(kind, "green") if style.color else ""), f"{code}  {words_of(run)}")
    name = plain(run.name, 60)
    return hanging(Text(name if len(name) < width else f"...{name[4 - width :]}"), words, width)


def concise(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render one line for each run, without a width."""
    outcomes = Counter[str]()
    for run, code in runs:
        outcomes[outcome(run)] += 1
        line = f"{plain(run.name, 200)}: {outcome(run)} {code}: {words_of(run)}\n"
        yield line if style.unicode else line.encode("ascii", "replace").decode()
        del run
    yield total(outcomes) + "\n"


def as_markdown(runs: Runs, names: Sequence[str], style: Style) -> Iterator[str]:
    """Render a table."""
    outcomes = Counter[str]()
    yield "| run | outcome | exit code | findings |\n| --- | --- | ---: | --- |\n"
    for run, code in runs:
        outcomes[outcome(run)] += 1
        line = f"| {inert(plain(run.name, 200))} | {outcome(run)} | {code} | {inert(words_of(run))} |\n"
        yield line if style.unicode else line.encode("ascii", "xmlcharrefreplace").decode()
        del run
    yield f"\n{total(outcomes)}\n"


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

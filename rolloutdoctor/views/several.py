"""Several runs, one line each, and a total."""

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.views.layout import as_text, hanging, many
from rolloutdoctor.views.markup import inert
from rolloutdoctor.views.structured import SCHEMA_VERSION, report_body
from rolloutdoctor.views.style import COLORS, Style, plain
from rolloutdoctor.views.terminal import render

Coded = tuple[CheckedRun, int]
"""A run with its exit code."""


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


def total(runs: Sequence[Coded]) -> str:
    """Count the runs by outcome, the worst first."""
    found = [outcome(run) for run, _ in runs]
    words = [
        f"{found.count(kind):,} {words}"
        for kind, words in (
            ("unreadable", "unreadable"),
            ("error", "with errors"),
            ("warning", "with warnings"),
            ("untested", "untested"),
            ("no fault", "without a fault"),
        )
        if kind in found
    ]
    return f"{many(len(runs), 'run')}: {', '.join(words)}."


def _codes(run: CheckedRun) -> str:
    """Codes of the faults by severity."""
    if run.report is None:
        return plain(run.error, 300)
    parts = []
    for severity in (Severity.ERROR, Severity.WARNING):
        codes = [finding.code for finding in run.report.findings if finding.severity is severity]
        if codes:
            parts.append(f"{severity.label} {' '.join(codes)}")
    size, coverage = run.report.input, run.report.coverage
    applicable = coverage.rules - len(run.report.not_applicable)
    told = "; ".join(parts) or f"{coverage.tested} of {applicable} rules tested"
    return f"{told} ({many(size.rows, 'row')}, {many(size.steps, 'step')})"


def full(runs: Sequence[Coded], style: Style) -> str:
    """Render one line for each run, its whole report with -v, and the total."""
    return as_text(_parts(runs, style), style)


def _parts(runs: Sequence[Coded], style: Style) -> Iterator[RenderableType]:
    width = min(max((len(plain(run.name, 60)) for run, _ in runs), default=0) + 2, style.width // 2)
    for run, code in () if style.quiet else runs:
        kind = outcome(run)
        color = {"error": COLORS[Severity.ERROR], "warning": COLORS[Severity.WARNING], "unreadable": "bold red"}
        words = Text.assemble(
            (f"{kind:<11}", color.get(kind, "green") if style.color else ""), f"{code}  {_codes(run)}"
        )
        name = plain(run.name, 60)
        yield hanging(Text(name if len(name) < width else f"...{name[4 - width :]}"), words, width)
    if style.verbose:
        for run, _ in runs:
            if run.report is not None:
                yield ""
                yield Text(plain(run.name, 200), style="bold" if style.color else "")
                yield Text.from_ansi(render(run.report, style).rstrip("\n"))
        yield ""
    yield Text(total(runs), style="bold" if style.color else "")


def concise(runs: Sequence[Coded], style: Style) -> str:
    """Render one line for each run, without a width."""
    lines = [f"{plain(run.name, 200)}: {outcome(run)} {code}: {_codes(run)}\n" for run, code in runs]
    text = "".join(lines) + total(runs) + "\n"
    return text if style.unicode else text.encode("ascii", "replace").decode()


def as_markdown(runs: Sequence[Coded], style: Style) -> str:
    """Render a table."""
    lines = ["| run | outcome | exit code | findings |", "| --- | --- | ---: | --- |"]
    lines += [
        f"| {inert(plain(run.name, 200))} | {outcome(run)} | {code} | {inert(_codes(run))} |" for run, code in runs
    ]
    text = "\n".join([*lines, "", total(runs)]) + "\n"
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def as_json(runs: Sequence[Coded], style: Style) -> str:
    """Render one JSON object with a report for each run."""
    return (
        json_text(
            {"schema_version": SCHEMA_VERSION, "runs": list(_bodies(runs))}, indent=2, ascii_only=not style.unicode
        )
        + "\n"
    )


def as_json_lines(runs: Sequence[Coded], style: Style) -> str:
    """Render one JSON object a line, a run each."""
    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in _bodies(runs))


def _bodies(runs: Sequence[Coded]) -> Iterator[dict[str, object]]:
    for run, code in runs:
        yield {
            "name": run.name,
            "files": list(run.files),
            "outcome": outcome(run),
            "exit_code": code,
            "error": run.error or None,
            "report": None if run.report is None else report_body(run.report),
        }


RENDERERS: dict[str, Callable[[Sequence[Coded], Style], str]] = {
    "full": full,
    "concise": concise,
    "json": as_json,
    "jsonl": as_json_lines,
    "markdown": as_markdown,
}

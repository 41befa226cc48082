"""The report for a person at a terminal: one line a rule with the magnitude first, then evidence, then what to do."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolloutdoctor.report.audit_words import audit_lines
from rolloutdoctor.report.concise import counts
from rolloutdoctor.report.layout import as_text, configuration, hanging, header
from rolloutdoctor.report.style import COLORS, Style, plain, shown
from rolloutdoctor.results.findings import Finding, Report

_SIGNS = {"error": ("✖", "x"), "warning": ("▲", "!"), "info": ("●", "i")}


def render(report: Report, style: Style) -> str:
    """Render the report as text, with escape sequences if `style.color`."""
    return as_text(_parts(report, style), style)


def _parts(report: Report, style: Style) -> Iterator[RenderableType]:
    yield header(report)
    yield ""
    lines = list(audit_lines(report.audit))
    if lines:
        yield hanging(Text("audit"), Text("\n".join(plain(line, 300) for line in lines)), 11)
        yield ""
    for finding in report.findings:
        yield from _finding(finding, style)
        yield ""
    sign = "✔" if style.unicode else "+"
    if report.clean:
        names = ", ".join(f"{code} {name}" for code, name in report.clean)
        yield hanging(Text(f"{sign} clean", style="green" if style.color else ""), Text(names), 11)
    dash = "–" if style.unicode else "-"
    for each in report.not_applicable:
        yield hanging(Text(f"{dash} n/a"), Text(f"{each.code} {each.name}: {plain(each.reason, 300)}"), 11)
    for one in report.skipped:
        words = Text(f"{one.code} {one.name}: {plain(one.reason, 300)}")
        words.append(f"\nto run it: {plain(one.remedy, 300)}", style="dim" if style.color else "")
        yield hanging(Text(f"{dash} skipped", style="dim" if style.color else ""), words, 11)
    if report.clean or report.not_applicable or report.skipped:
        yield ""
    yield from configuration(report)
    for note in report.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 11)
    if report.findings:
        yield "These are measurements of the rows, not proof of a broken run."
    yield Text(f"{counts(report)}.", style="bold" if style.color else "")


def _finding(finding: Finding, style: Style) -> Iterator[RenderableType]:
    label = finding.severity.label
    sign = _SIGNS[label][0 if style.unicode else 1]
    color = COLORS[finding.severity] if style.color else ""
    headline = Text()
    headline.append(plain(finding.headline, 300), style="bold" if style.color else "")
    yield hanging(Text(f"{sign} {label}", style=color), headline, 11)
    rows = [
        ("rule", f"{finding.code} {finding.name}, {finding.verdict}"),
        ("found", finding.message),
        ("evidence", finding.evidence),
        ("do", finding.advice),
        ("where", "\n".join(_places(finding, style))),
        ("measures", _measures(finding, style.width - 22)),
    ]
    if style.verbose:
        rows.append(("read more", "\n".join(finding.references)))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=9, no_wrap=True, style="dim" if style.color else "")
    grid.add_column(overflow="fold")
    for name, words in rows:
        if words:
            grid.add_row(name, Text(words))
    yield Padding(Group(grid), (0, 0, 0, 11))


def _places(finding: Finding, style: Style) -> Iterator[str]:
    for place in finding.examples if style.verbose else finding.examples[:3]:
        where = [f"step {place.step}"]
        if place.group_id is not None:
            where.append(f"group {plain(place.group_id, 40)}")
        if place.sample_id is not None:
            where.append(f"row {plain(place.sample_id, 40)}")
        yield f"{' '.join(where)}: {plain(place.note, 120)}"


def _measures(finding: Finding, width: int) -> str:
    """Names with their values, broken between measures only."""
    lines = [""]
    for item in (f"{name} {shown(measure)}" for name, measure in finding.measures.items()):
        longer = f"{lines[-1]}   {item}" if lines[-1] else item
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(item)
    return "\n".join(lines)

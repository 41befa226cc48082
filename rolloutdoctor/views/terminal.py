"""The report for a person at a terminal: the verdict, then each fault in five lines; everything with -v."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rolloutdoctor.results.findings import Finding, Report, Severity
from rolloutdoctor.results.related import PROPERTIES, by_family, explanation
from rolloutdoctor.results.rule_pages import page_of
from rolloutdoctor.views.audit_words import audit_line, audit_lines
from rolloutdoctor.views.concise import counts, standing
from rolloutdoctor.views.layout import as_text, assumptions, configuration, hanging, header, many
from rolloutdoctor.views.style import COLORS, Style, plain, shown, where
from rolloutdoctor.views.untested import best_remedy, by_reason, by_remedy
from rolloutdoctor.views.verdict import verdict
from rolloutdoctor.views.vital_lines import vital_lines

_PLACES = 3
"""Places of a finding that are named."""

_SIGNS = {"error": ("✖", "x"), "warning": ("▲", "!"), "info": ("●", "i")}


def render(report: Report, style: Style) -> str:
    """Render the report as text, with escape sequences if `style.color`."""
    return as_text(_parts(report, style), style)


def _parts(report: Report, style: Style) -> Iterator[RenderableType]:
    is_short = style.quiet and not style.verbose
    yield Text(plain(verdict(report), 600), style="bold" if style.color else "")
    if not is_short:
        yield ""
        if report.vitals and (style.verbose or not report.input.rows):
            yield from vital_lines(report.vitals, style)
            yield ""
        yield from _everything(report, style) if style.verbose else _in_short(report, style)
        yield header(report)
    yield Text(f"{counts(report)}.", style="bold" if style.color else "")


def _in_short(report: Report, style: Style) -> Iterator[RenderableType]:
    """Tell a fault in five lines, information once a family and properties in one line; then the rest in short."""
    codes = [finding.code for finding in report.findings]
    properties = []
    for finding, members in by_family(report.findings):
        if finding.severity < Severity.WARNING and finding.code in PROPERTIES:
            properties.append(finding)
            continue
        see = f"follows from {finding.follows_from}" if finding.follows_from else explanation(finding.code, codes)
        also = f"also {', '.join(members)}" if members else ""
        if finding.severity < Severity.WARNING or finding.follows_from:
            yield _headline(finding, style, also or see)
            continue
        yield _headline(finding, style, also)
        why = ("see", see) if see else ("why", finding.why)
        place = ("where", _in_brief(finding))
        yield _grid((why, ("evidence", finding.evidence), place, ("do", finding.advice)), style)
    if report.findings:
        yield ""
    if properties:
        words = ", ".join(f"{finding.code} {finding.name}" for finding in properties)
        yield hanging(Text("other info"), Text(words), 11)
    audit = audit_line(report.audit)
    if audit:
        yield hanging(Text("audit"), Text(plain(audit, 300)), 11)
    for title, words in assumptions(report):
        yield hanging(Text(title), Text(words), 11)
    if report.skipped:
        yield hanging(Text("untested"), Text(plain(_untested(report), 300)), 11)
    for note in report.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 11)
    if report.findings or report.skipped:
        yield Text(f"`{page_of('CODE')}` explains a rule; -v shows measures, places and options.")


def _untested(report: Report) -> str:
    """Count the rules that could not be tested, and say the one thing that would test most of them."""
    count = len(report.skipped)
    rules = report.skipped[0].code if count == 1 else many(count, "rule")
    remedy, tested = best_remedy(report.skipped) or ("", 0)
    if not tested:
        return rules
    return f"{rules}; to test {f'{tested:,} of them' if tested < count else 'it' if count == 1 else 'them'}: {remedy}"


def _everything(report: Report, style: Style) -> Iterator[RenderableType]:
    lines = list(audit_lines(report.audit))
    if lines:
        yield hanging(Text("audit"), Text("\n".join(plain(line, 300) for line in lines)), 11)
        yield ""
    codes = [finding.code for finding in report.findings]
    for finding in report.findings:
        yield _headline(finding, style)
        yield _details(finding, style, explanation(finding.code, codes))
        yield ""
    sign = "✔" if style.unicode else "+"
    if report.clean:
        bounded = {entry.code for entry in report.excluded}
        names = ", ".join(f"{code} {name}" for code, name in report.clean if code not in bounded)
        for line in [names] * bool(names) + [words for words in report.clean_words() if words[:6] in bounded]:
            yield hanging(Text(f"{sign} clean", style="green" if style.color else ""), Text(line), 11)
    dash = "–" if style.unicode else "-"
    for rules, reason in by_reason(report.not_applicable):
        yield hanging(Text(f"{dash} n/a"), Text(f"{rules}: {plain(reason, 300)}"), 11)
    for rules, reason, remedy in by_remedy(report.skipped):
        words = Text(f"{rules}{reason and ': '}{plain(reason, 300)}")
        words.append(f"\nto run: {plain(remedy, 300)}", style="dim" if style.color else "")
        yield hanging(Text(f"{dash} skipped", style="dim" if style.color else ""), words, 11)
    if report.clean or report.not_applicable or report.skipped:
        yield ""
    yield from configuration(report)
    for note in report.notes:
        yield hanging(Text("note"), Text(plain(note, 400)), 11)
    if report.findings:
        source = "rollouts" if report.input.rows else "log"
        yield f"These are measurements of the {source}, not proof that the run is broken."


def _headline(finding: Finding, style: Style, see: str = "") -> RenderableType:
    label = finding.severity.label
    sign = _SIGNS[label][0 if style.unicode else 1]
    headline = Text()
    headline.append(f"{finding.code} ", style="dim" if style.color else "")
    headline.append(plain(finding.headline, 300), style="bold" if style.color else "")
    if see:
        headline.append(f"; {see}")
    return hanging(Text(f"{sign} {label}", style=COLORS[finding.severity] if style.color else ""), headline, 11)


def _details(finding: Finding, style: Style, see: str) -> RenderableType:
    rows = (
        ("rule", f"{finding.code} {finding.name}, {standing(finding)}"),
        ("why", finding.why),
        ("see", see),
        ("found", finding.message),
        ("evidence", finding.evidence),
        ("do", finding.advice),
        ("where", "\n".join(_places(finding))),
        ("measures", _measures(finding, style.width - 22)),
        ("read more", "\n".join(finding.references)),
    )
    return _grid(rows, style)


def _grid(rows: Iterable[tuple[str, str]], style: Style) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=9, no_wrap=True, style="dim" if style.color else "")
    grid.add_column(overflow="fold")
    for name, words in rows:
        if words:
            grid.add_row(name, Text(words))
    return Padding(Group(grid), (0, 0, 0, 11))


def _places(finding: Finding) -> Iterator[str]:
    for place in finding.examples:
        yield where(place)


def _in_brief(finding: Finding) -> str:
    """Name where it begins, or the worst places, three at most; without any the steps, or the whole run."""
    if finding.onset is not None:
        return f"from step {finding.onset:g} on"
    places = [where(replace(place, sample_id=None, note="")).rstrip(": ") for place in finding.examples]
    if places:
        return "; ".join(list(dict.fromkeys(places))[:_PLACES])
    if finding.cause is not None and finding.cause.steps is not None:
        first, last, count = finding.cause.steps
        return f"step {first}" if count == 1 else f"{many(count, 'step')}, {first} to {last}"
    return "the whole run"


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

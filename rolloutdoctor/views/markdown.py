"""Markdown, for a comment on a pull request or the summary of a CI job."""

import re
from collections.abc import Iterator

from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.views.audit_words import audit_lines
from rolloutdoctor.views.concise import counts, severities, standing
from rolloutdoctor.views.layout import made_by
from rolloutdoctor.views.markup import in_html, safe
from rolloutdoctor.views.style import Style, plain, set_to, shown, where


def render(report: Report, style: Style) -> str:
    """Render the report as GitHub-flavoured Markdown."""
    text = "\n".join(_lines(report))
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def _lines(report: Report) -> Iterator[str]:
    yield f"## rolloutdoctor: {severities(report)}\n"
    size, who = report.input, safe(made_by(report), 300)
    yield f"{who}; {size.rows:,} rows, {size.groups:,} groups, {size.steps:,} steps, {size.tokens:,} tokens\n"
    lines = list(audit_lines(report.audit))
    if lines:
        yield "**Audit**\n"
        yield from (f"- {safe(line, 400)}" for line in lines)
        yield ""
    if report.findings:
        yield "| severity | rule | verdict | magnitude |\n| --- | --- | --- | --- |"
        for finding in report.findings:
            cells = (
                finding.severity.label,
                f"{finding.code} {finding.name}",
                standing(finding),
                safe(finding.headline, 300),
            )
            yield f"| {' | '.join(cells)} |"
        yield ""
        for finding in report.findings:
            yield from _finding(finding)
    if report.clean:
        yield f"**Clean:** {', '.join(report.clean_words())}\n"
    if report.not_applicable:
        yield "**Not applicable**\n"
        for each in report.not_applicable:
            yield f"- {each.code} {each.name}: {safe(each.reason, 300)}"
        yield ""
    if report.skipped:
        yield "**Skipped**\n"
        for entry in report.skipped:
            yield f"- {entry.code} {entry.name}: {safe(entry.reason, 300)}; to run it: {safe(entry.remedy, 300)}"
        yield ""
    chosen = [
        f"- {_code(set_to(name, setting))} ({'assumed: ' * setting.assumed}{safe(setting.origin, 300)})"
        for name, setting in report.config.items()
        if setting.assumed or not setting.origin.startswith("default")
    ]
    if chosen:
        yield "<details><summary>Configuration that was set or assumed</summary>\n"
        yield from chosen
        yield "\n</details>\n"
    for note in report.notes:
        yield f"> {safe(note, 400)}\n"
    yield f"{counts(report)}.\n"


def _finding(finding: Finding) -> Iterator[str]:
    yield f"<details><summary>{finding.code} {finding.name}: {in_html(finding.headline, 300)}</summary>\n"
    yield f"{safe(finding.message, 600)}\n"
    yield f"**Evidence:** {safe(finding.evidence, 600)}\n"
    yield f"**Do:** {safe(finding.advice, 600)}\n"
    if finding.examples:
        yield "**Where**\n"
        yield from (f"- {_code(where(place))}" for place in finding.examples)
        yield ""
    yield "| measure | value | unit |\n| --- | ---: | --- |"
    yield from (f"| {_code(name)} | {shown(measure)} | {measure.unit} |" for name, measure in finding.measures.items())
    if finding.references:
        yield f"\nRead more: {', '.join(finding.references)}"
    yield "\n</details>\n"


def _code(text: object) -> str:
    """A code span around text of any kind: nothing in it is markup, a link or a mention."""
    words = plain(text, 300).replace("|", "\u00a6")
    longest = max((len(run) for run in re.findall("`+", words)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {words} {fence}" if longest else f"{fence}{words}{fence}"

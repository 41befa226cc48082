"""JUnit XML, which every CI server shows: one test case a rule."""

import re

from rolloutdoctor.results.findings import Finding, NotApplicable, Report, Skipped
from rolloutdoctor.views.concise import standing
from rolloutdoctor.views.style import Style, plain, shown, where

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(report: Report, style: Style) -> str:
    """Render one test case a rule.

    A finding of `style.fail_at` or above is a failure. A lesser one, one that follows from another and one in the
    baseline pass with their words as output. A rule that is not applicable or could not be tested is skipped, and its
    message says which.
    """
    cases = [_found(finding, style) for finding in report.findings]
    cases += [f"    <testcase {_who(code, name)}/>" for code, name in report.clean]
    cases += [_not_applicable(entry) for entry in report.not_applicable]
    cases += [_skipped(entry) for entry in report.skipped]
    skipped = len(report.not_applicable) + len(report.skipped)
    failures = sum(_fails(finding, style) for finding in report.findings)
    counts = f'tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}"'
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="rolloutdoctor" {counts}>',
        f'  <testsuite name="rolloutdoctor" {counts}>',
        *cases,
        "  </testsuite>",
        "</testsuites>",
    ]
    text = "\n".join(lines) + "\n"
    return text if style.unicode else text.encode("ascii", "xmlcharrefreplace").decode()


def _fails(finding: Finding, style: Style) -> bool:
    is_new = finding.follows_from is None and not finding.known
    return style.fail_at is not None and is_new and finding.severity >= style.fail_at


def _found(finding: Finding, style: Style) -> str:
    body = _body(finding)
    if _fails(finding, style):
        kind = _attribute(f"{finding.severity.label} {finding.verdict}")
        inner = f"<failure type={kind} message={_attribute(finding.headline)}>{body}</failure>"
    else:
        inner = f"<system-out>{body}</system-out>"
    return f"    <testcase {_who(finding.code, finding.name)}>\n      {inner}\n    </testcase>"


def _not_applicable(entry: NotApplicable) -> str:
    message = _attribute(f"not applicable: {entry.reason}")
    return f"    <testcase {_who(entry.code, entry.name)}>\n      <skipped message={message}/>\n    </testcase>"


def _skipped(entry: Skipped) -> str:
    message = _attribute(f"{entry.reason}; to run it: {entry.remedy}")
    return f"    <testcase {_who(entry.code, entry.name)}>\n      <skipped message={message}/>\n    </testcase>"


def _body(finding: Finding) -> str:
    from xml.sax.saxutils import escape

    lines = [
        f"{finding.severity.label}, {standing(finding)}: {finding.headline}",
        finding.message,
        f"evidence: {finding.evidence}",
        f"do: {finding.advice}",
        *(where(place) for place in finding.examples),
        *(f"{name} {shown(measure)}" for name, measure in finding.measures.items()),
        *finding.references,
    ]
    return "\n".join(escape(_clean(line)) for line in lines)


def _who(code: str, name: str) -> str:
    return f"classname={_attribute('rolloutdoctor.' + code)} name={_attribute(name)}"


def _attribute(text: str) -> str:
    from xml.sax.saxutils import quoteattr

    return quoteattr(_clean(text))


def _clean(text: str) -> str:
    return _NOT_XML.sub("", plain(text, 600))

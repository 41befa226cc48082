"""Annotations of a GitHub Actions job: one workflow command a finding, then a line that counts."""

from rolloutdoctor.results.findings import Report
from rolloutdoctor.views.concise import counts, standing
from rolloutdoctor.views.style import Style, plain

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}


def render(report: Report, style: Style) -> str:
    """Render findings as workflow commands.

    A job shows ten annotations of a kind, so that rules that could not be tested have none: the last line counts them.
    """
    lines = [
        _command(
            # A cause counts for what follows from it, and a baseline for what it has.
            "notice" if finding.follows_from or finding.known else _COMMANDS[finding.severity.label],
            f"{finding.code} {finding.name}",
            [
                f"{finding.headline} ({standing(finding)})",
                finding.message,
                f"evidence: {finding.evidence}",
                f"do: {finding.advice}",
                f"rule: {finding.page}",
            ],
        )
        for finding in report.findings
    ]
    lines += [f"clean {words}" for words in report.clean_words()]
    lines += [
        f"not applicable {entry.code} {entry.name}: {plain(entry.reason, 600)}" for entry in report.not_applicable
    ]
    text = "\n".join([*lines, f"{counts(report)}."]) + "\n"
    return text if style.unicode else text.encode("ascii", "replace").decode()


def _command(name: str, title: str, lines: list[str]) -> str:
    body = "%0A".join(_data(plain(line, 600)) for line in lines)
    return f"::{name} title={_property(plain(title))}::{body}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

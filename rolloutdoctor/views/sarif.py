"""SARIF 2.1.0 (OASIS, Static Analysis Results Interchange Format), which code hosts show beside the code."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from urllib.parse import quote

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Example, Finding, Report, Skipped
from rolloutdoctor.results.rule_pages import SITE, page_of
from rolloutdoctor.views.concise import counts, standing
from rolloutdoctor.views.style import Style, plain, where

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_MOST = 10
"""Places of a finding: what a viewer shows of one."""


def render(report: Report, style: Style) -> str:
    """Render one run with a result for each finding.

    A finding that follows from another one is a note, as in annotations: its cause counts for it. One in the baseline
    is suppressed. What could not be tested is a notification of the run, never a result.
    """
    files = [_uri(name) for name in report.files]
    rules = {finding.code: _rule(finding) for finding in report.findings}
    driver: dict[str, object] = {
        "name": "rolloutdoctor",
        "semanticVersion": report.version,
        "rules": list(rules.values()),
    }
    invocation: dict[str, object] = {
        "executionSuccessful": not report.nothing_checked,
        "toolExecutionNotifications": [_notification(entry) for entry in report.skipped],
    }
    run: dict[str, object] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "artifacts": [{"location": {"uri": uri}} for uri in files],
        "results": [_result(list(rules).index(finding.code), finding, files) for finding in report.findings],
        "properties": {
            "summary": f"{counts(report)}.",
            "clean": [plain(words, 600) for words in report.clean_words()],
            "not_applicable": [
                {"code": entry.code, "reason": plain(entry.reason, 600)} for entry in report.not_applicable
            ],
            "notes": [plain(note, 600) for note in report.notes],
        },
    }
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json_text(document, indent=2, ascii_only=not style.unicode) + "\n"


def _rule(finding: Finding) -> dict[str, object]:
    page = page_of(finding.code)
    rule: dict[str, object] = {
        "id": finding.code,
        "name": finding.name,
        "shortDescription": {"text": finding.name.replace("-", " ")},
        "help": {"text": f"`{page}` explains it."},
        "properties": {"references": list(finding.references)},
    }
    return {**rule, "helpUri": page} if SITE else rule


def _result(rule: int, finding: Finding, files: list[str]) -> dict[str, object]:
    lines = [
        f"{finding.headline} ({standing(finding)})",
        finding.message,
        f"Evidence: {finding.evidence}",
        finding.advice,
    ]
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": "note" if finding.follows_from else _LEVELS[finding.severity.label],
        "message": {"text": "\n".join(plain(line, 600) for line in lines if line)},
        "locations": list(_locations(finding, files)),
        # The same fault in a later run of the same kind.
        "partialFingerprints": {"rolloutdoctor/v1": "/".join([finding.code, *_cause(finding)])},
        **_of_baseline(finding),
        "properties": {
            "verdict": finding.verdict,
            "severity": finding.severity.label,
            "follows_from": finding.follows_from,
            "measures": {
                name: {"value": measure.value, "unit": measure.unit} for name, measure in finding.measures.items()
            },
        },
    }


def _of_baseline(finding: Finding) -> dict[str, object]:
    """Whether the baseline has a finding (SARIF 2.1.0, 3.27.23 and 3.27.24); nothing without one."""
    if finding.known is None:
        return {}
    accepted = {"kind": "external", "status": "accepted", "justification": "It is in the file that --baseline names."}
    state = {"baselineState": "unchanged" if finding.known else "new"}
    # An empty list says that it is not suppressed, no list that nobody knows.
    return {**state, "suppressions": [accepted] if finding.known else []}


def _cause(finding: Finding) -> Iterator[str]:
    if finding.cause is not None:
        yield finding.cause.hypothesis


def _locations(finding: Finding, files: list[str]) -> Iterator[Mapping[str, object]]:
    """Yield where to look: the first file of the run, whose rows have no lines, and the place in its own words."""
    file: dict[str, object] = {}
    if files:
        file = {"physicalLocation": {"artifactLocation": {"uri": files[0], "index": 0}}}
    places = [_logical(example) for example in finding.examples[:_MOST]]
    for place in places:
        yield {**file, "logicalLocations": [place]}
    if not places and file:
        yield file


def _logical(place: Example) -> dict[str, object]:
    labels = {"step": str(place.step), "group": place.group_id, "row": place.sample_id}
    names = {kind: plain(label, 200) for kind, label in labels.items() if label is not None}
    kind, name = list(names.items())[-1]
    return {"name": name, "fullyQualifiedName": "/".join(names.values()), "kind": kind, "properties": _note(place)}


def _note(place: Example) -> dict[str, object]:
    return {"where": where(place), "step": place.step}


def _notification(entry: Skipped) -> dict[str, object]:
    words = f"{entry.code} {entry.name} could not be tested: {entry.reason}; to test it: {entry.remedy}"
    return {"level": "none", "message": {"text": plain(words, 600)}, "associatedRule": {"id": entry.code}}


def _uri(name: str) -> str:
    """A file as a relative reference (RFC 3986): a path as it was given, of any other address its last part alone.

    >>> _uri("runs/a b.parquet"), _uri("/home/me/run.parquet"), _uri("s3://bucket/run.parquet")
    ('runs/a%20b.parquet', 'run.parquet', 'run.parquet')
    """
    is_elsewhere = name.startswith(("/", "..")) or "://" in name or ":" in name.partition("/")[0]
    return quote(plain(PurePosixPath(name).name if is_elsewhere else name, 600))

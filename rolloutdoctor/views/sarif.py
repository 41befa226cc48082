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
    rules = {found.code: _rule(found) for found in report.findings}
    driver: dict[str, object] = {
        "name": "rolloutdoctor",
        "semanticVersion": report.version,
        "rules": list(rules.values()),
    }
    invocation: dict[str, object] = {
        "executionSuccessful": not report.nothing_checked,
        "toolExecutionNotifications": [_notification(one) for one in report.skipped],
    }
    run: dict[str, object] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "artifacts": [{"location": {"uri": uri}} for uri in files],
        "results": [_result(list(rules).index(found.code), found, files) for found in report.findings],
        "properties": {
            "summary": f"{counts(report)}.",
            "clean": [plain(words, 600) for words in report.clean_words()],
            "not_applicable": [{"code": one.code, "reason": plain(one.reason, 600)} for one in report.not_applicable],
            "notes": [plain(note, 600) for note in report.notes],
        },
    }
    whole = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json_text(whole, indent=2, ascii_only=not style.unicode) + "\n"


def _rule(found: Finding) -> dict[str, object]:
    page = page_of(found.code)
    rule: dict[str, object] = {
        "id": found.code,
        "name": found.name,
        "shortDescription": {"text": found.name.replace("-", " ")},
        "help": {"text": f"`{page}` explains it."},
        "properties": {"references": list(found.references)},
    }
    return {**rule, "helpUri": page} if SITE else rule


def _result(rule: int, found: Finding, files: list[str]) -> dict[str, object]:
    lines = [f"{found.headline} ({standing(found)})", found.message, f"Evidence: {found.evidence}", found.advice]
    return {
        "ruleId": found.code,
        "ruleIndex": rule,
        "level": "note" if found.follows_from else _LEVELS[found.severity.label],
        "message": {"text": "\n".join(plain(line, 600) for line in lines if line)},
        "locations": list(_locations(found, files)),
        # The same fault in a later run of the same kind.
        "partialFingerprints": {"rolloutdoctor/v1": "/".join([found.code, *_cause(found)])},
        **_of_baseline(found),
        "properties": {
            "verdict": found.verdict,
            "severity": found.severity.label,
            "follows_from": found.follows_from,
            "measures": {
                name: {"value": measure.value, "unit": measure.unit} for name, measure in found.measures.items()
            },
        },
    }


def _of_baseline(found: Finding) -> dict[str, object]:
    """Whether the baseline has a finding (SARIF 2.1.0, 3.27.23 and 3.27.24); nothing without one."""
    if found.known is None:
        return {}
    accepted = {"kind": "external", "status": "accepted", "justification": "It is in the file that --baseline names."}
    state = {"baselineState": "unchanged" if found.known else "new"}
    # An empty list says that it is not suppressed, no list that nobody knows.
    return {**state, "suppressions": [accepted] if found.known else []}


def _cause(found: Finding) -> Iterator[str]:
    if found.cause is not None:
        yield found.cause.hypothesis


def _locations(found: Finding, files: list[str]) -> Iterator[Mapping[str, object]]:
    """Yield where to look: the first file of the run, whose rows have no lines, and the place in its own words."""
    file: dict[str, object] = {}
    if files:
        file = {"physicalLocation": {"artifactLocation": {"uri": files[0], "index": 0}}}
    places = [_logical(one) for one in found.examples[:_MOST]]
    for place in places:
        yield {**file, "logicalLocations": [place]}
    if not places and file:
        yield file


def _logical(place: Example) -> dict[str, object]:
    known = {"step": str(place.step), "group": place.group_id, "row": place.sample_id}
    names = {kind: plain(one, 200) for kind, one in known.items() if one is not None}
    kind, name = list(names.items())[-1]
    return {"name": name, "fullyQualifiedName": "/".join(names.values()), "kind": kind, "properties": _note(place)}


def _note(place: Example) -> dict[str, object]:
    return {"where": where(place), "step": place.step}


def _notification(one: Skipped) -> dict[str, object]:
    words = f"{one.code} {one.name} could not be tested: {one.reason}; to test it: {one.remedy}"
    return {"level": "none", "message": {"text": plain(words, 600)}, "associatedRule": {"id": one.code}}


def _uri(name: str) -> str:
    """A file as a relative reference (RFC 3986): a path as it was given, of any other address its last part alone.

    >>> _uri("runs/a b.parquet"), _uri("/home/me/run.parquet"), _uri("s3://bucket/run.parquet")
    ('runs/a%20b.parquet', 'run.parquet', 'run.parquet')
    """
    is_elsewhere = name.startswith(("/", "..")) or "://" in name or ":" in name.partition("/")[0]
    return quote(plain(PurePosixPath(name).name if is_elsewhere else name, 600))

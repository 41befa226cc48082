"""JSON and JSON Lines: for programs. Numbers are never rounded; what is not defined or not finite is null."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolloutdoctor.results.audit import AuditEntry, Cause
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Finding, Report, Setting
from rolloutdoctor.views.style import Style, is_known

SCHEMA_VERSION = 1


def as_json(report: Report, style: Style) -> str:
    """Render the whole report as one JSON object."""
    return json_text(report_body(report), indent=2, ascii_only=not style.unicode) + "\n"


def as_json_lines(report: Report, style: Style) -> str:
    """Render one JSON object a line: the run, then what became of every rule, each with its type."""
    body = report_body(report)
    findings, clean = body.pop("findings"), body.pop("clean")
    excluded = {one["code"]: one for one in body.pop("excluded")}
    not_applicable, skipped = body.pop("not_applicable"), body.pop("skipped")

    def lines() -> Iterator[dict[str, object]]:
        yield {"type": "run", **body}
        for finding in findings:
            yield {"type": "finding", **finding}
        for code in clean:
            yield {"type": "clean", "code": code} | ({"excluded": excluded[code]} if code in excluded else {})
        for one in not_applicable:
            yield {"type": "not_applicable", **one}
        for one in skipped:
            yield {"type": "skipped", **one}

    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in lines())


def report_body(report: Report) -> dict[str, Any]:
    """Return the report as the JSON object that programs read."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rolloutdoctor": report.version,
        "device": report.device,
        "dtype": report.dtype,
        "input": vars(report.input),
        "trainer": {"name": report.trainer, "version": report.trainer_version, "config": settings(report.config)},
        "findings": [finding_body(finding) for finding in report.findings],
        "clean": [code for code, _ in report.clean],
        "not_applicable": [{"code": one.code, "name": one.name, "reason": one.reason} for one in report.not_applicable],
        "skipped": [
            {"code": one.code, "name": one.name, "reason": one.reason, "remedy": one.remedy} for one in report.skipped
        ],
        "coverage": vars(report.coverage),
        "audit": [_audited(entry) for entry in report.audit],
        "notes": list(report.notes),
        "excluded": [
            {name: known(value) for name, value in vars(one).items()} | {"words": one.words} for one in report.excluded
        ],
    }


def finding_body(finding: Finding) -> dict[str, object]:
    """Return a finding as it is in the JSON of a report."""
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.label,
        "verdict": finding.verdict,
        "follows_from": finding.follows_from,
        "headline": finding.headline,
        "message": finding.message,
        "evidence": finding.evidence,
        "advice": finding.advice,
        "measures": {
            name: {"value": known(measure.value), "unit": measure.unit} for name, measure in finding.measures.items()
        },
        "per_step": [_row(row) for row in finding.per_step],
        "examples": [
            {"step": place.step, "group_id": place.group_id, "sample_id": place.sample_id, "note": place.note}
            for place in finding.examples
        ],
        "fix": finding.fix,
        "references": list(finding.references),
    } | ({} if finding.cause is None else {"cause": _cause(finding.cause)})


def _audited(entry: AuditEntry) -> dict[str, object]:
    first = entry.first
    body: dict[str, object] = {
        "quantity": entry.quantity,
        "compared": entry.compared,
        "agree": entry.agree,
        "worst": known(entry.worst),
        "first": None if first is None else {name: known(value) for name, value in vars(first).items()},
    }
    if entry.with_fixes:
        body["with"] = list(entry.with_fixes)
    if entry.not_compared:
        body |= {"not_compared": entry.not_compared, "reason": entry.reason}
    if entry.window > 1:
        body["window"] = entry.window
    if entry.shape:
        body["shape"] = entry.shape
    return body


def _cause(cause: Cause) -> dict[str, object]:
    names = ("hypothesis", "quantity", "compared", "as_recorded", "as_found", "worst")
    return {
        **{name: known(getattr(cause, name)) for name in names},
        "also": list(cause.also),
        "words": cause.words,
        "explains": list(cause.explains),
    }


def _row(row: Mapping[str, object]) -> dict[str, object]:
    return {name: known(value) for name, value in row.items()}


def settings(config: Mapping[str, Setting]) -> dict[str, object]:
    """Options with their origins."""
    return {
        key: {"value": setting.value, "origin": setting.origin, "assumed": setting.assumed}
        for key, setting in config.items()
    }


def known(value: object) -> object:
    """The value, or None where JSON has no word for it."""
    return value if is_known(value) else None

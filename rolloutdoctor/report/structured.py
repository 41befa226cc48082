"""JSON and JSON Lines: for programs. Numbers are never rounded; what is not defined or not finite is null."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolloutdoctor.report.style import Style, is_known
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Finding, Report, Setting

SCHEMA_VERSION = 1


def as_json(report: Report, style: Style) -> str:
    """Render the whole report as one JSON object."""
    return json_text(_body(report), indent=2, ascii_only=not style.unicode) + "\n"


def as_json_lines(report: Report, style: Style) -> str:
    """Render one JSON object a line: the run, then every finding, clean rule and skipped rule, each with its type."""
    body = _body(report)
    findings, clean, skipped = body.pop("findings"), body.pop("clean"), body.pop("skipped")

    def lines() -> Iterator[dict[str, object]]:
        yield {"type": "run", **body}
        for finding in findings:
            yield {"type": "finding", **finding}
        for code in clean:
            yield {"type": "clean", "code": code}
        for one in skipped:
            yield {"type": "skipped", **one}

    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in lines())


def _body(report: Report) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "rolloutdoctor": report.version,
        "device": report.device,
        "dtype": report.dtype,
        "input": vars(report.input),
        "trainer": {"name": report.trainer, "version": report.trainer_version, "config": settings(report.config)},
        "findings": [_finding(finding) for finding in report.findings],
        "clean": [code for code, _ in report.clean],
        "skipped": [
            {"code": one.code, "name": one.name, "reason": one.reason, "remedy": one.remedy} for one in report.skipped
        ],
        "notes": list(report.notes),
    }


def _finding(finding: Finding) -> dict[str, object]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity.label,
        "verdict": finding.verdict,
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

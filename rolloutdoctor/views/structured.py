"""JSON and JSON Lines: for programs. Numbers are never rounded; what is not defined or not finite is null."""

from collections.abc import Iterator, Mapping
from typing import Any

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.views.style import Style

SCHEMA_VERSION = 1

LINES: Mapping[str, Mapping[str, str]] = {
    "run": {
        "findings": "finding",
        "clean": "clean",
        "not_applicable": "not_applicable",
        "skipped": "skipped",
        "excluded": "excluded",
        "effects": "effect",
        "per_step": "step",
    },
    "effect": {"per_step": "step", "parts": "part", "groups": "group"},
    "comparison": {"findings": "finding", "quantities": "quantity", "parts": "part"},
    "answer": {"lines": "line", "others": "ledger"},
}
"""Of each type of line the lists that are lines of their own, and the types of these."""

_MODELS = {
    "Report": "Check",
    "Finding": "Finding",
    "Comparison": "Diff",
    "RunComparison": "Compare",
    "Recomputed": "Recompute",
    "Identification": "Identify",
    "RunInfo": "Info",
    "Verification": "Verify",
    "Why": "Why",
}
"""Result to the model of its JSON."""


def as_json(result: object, style: Style) -> str:
    """Render the whole of a result as one JSON object."""
    return json_text(body(result), indent=2, ascii_only=not style.unicode) + "\n"


def as_json_lines(result: object, style: Style) -> str:
    """Render one JSON object a line: the run, then what was found of it, each with its type."""
    document = body(result)
    first = "comparison" if "joined" in document else "answer" if "others" in document else "run"
    lines = _lines(document, first, {})
    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in lines)


def body(result: object) -> dict[str, Any]:
    """Return a result as the JSON object that programs read."""
    # pydantic takes long to import, and few outputs need it.
    from rolloutdoctor.views import models

    model: type[models.Model] = getattr(models, _MODELS[type(result).__name__])
    return model.model_validate(result).model_dump(by_alias=True, warnings=False)


def _lines(record: dict[str, Any], kind: str, of: Mapping[str, str]) -> Iterator[dict[str, object]]:
    lists = {name: record.pop(name) for name in LINES.get(kind, ()) if name in record}
    yield {"type": kind, **of, **record}
    for name, entries in lists.items():
        for entry in entries:
            inner = entry if isinstance(entry, dict) else {"code": entry}
            yield from _lines(inner, LINES[kind][name], {"effect": record["label"]} if kind == "effect" else {})

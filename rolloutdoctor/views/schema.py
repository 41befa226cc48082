"""JSON Schemas (draft 2020-12) of what the commands print with ``--format json`` and ``jsonl``."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.views import models
from rolloutdoctor.views.structured import LINES

Schema = Mapping[str, Any]

OUTPUTS: Mapping[str, tuple[str, Any, str]] = {
    "check": ("check --format json", models.Check, ""),
    "check-line": ("a line of check --format jsonl", models.Check, "run"),
    "diff": ("diff --format json", models.Diff, ""),
    "diff-line": ("a line of diff --format jsonl", models.Diff, "run"),
    "compare": ("compare --format json", models.Compare, ""),
    "compare-line": ("a line of compare --format jsonl", models.Compare, "comparison"),
    "why": ("why --format json", models.Why, ""),
    "why-line": ("a line of why --format jsonl", models.Why, "answer"),
    "recompute": ("export --what tokens --format json", models.Recompute, ""),
    "recompute-line": ("a line of export --what tokens --format jsonl", models.Recompute, "run"),
    "verify": ("verify --format json", models.Verify, ""),
    "identify": ("identify --format json", models.Identify, ""),
    "info": ("info --format json", models.Info, ""),
    "names": ("explain --format json", list[models.Entry], ""),
    "rule": ("explain RULE --format json", models.Rule, ""),
    "rules": ("explain rules --format json", list[models.Rule], ""),
    "cause": ("explain CAUSE --format json", models.CauseEntry, ""),
    "causes": ("explain causes --format json", list[models.CauseEntry], ""),
    "fix": ("explain FIX --format json", models.Fix, ""),
    "fixes": ("explain fixes --format json", list[models.Fix], ""),
    "trainer": ("explain TRAINER --format json", models.TrainerEntry, ""),
    "trainers": ("explain trainers --format json", list[models.TrainerEntry], ""),
    "metric": ("explain METRIC --format json", models.Metric, ""),
    "metrics": ("explain metrics --format json", list[models.MetricEntry], ""),
    "column": ("explain COLUMN --format json", models.Column, ""),
    "columns": ("explain columns --format json", list[models.Column], ""),
    "option": ("explain OPTION --format json", models.NamedOption, ""),
    "options": ("explain options --format json", list[models.NamedOption], ""),
    "term": ("explain TERM --format json", models.Term, ""),
    "terms": ("explain terms --format json", list[models.Term], ""),
}
"""Name of an output to the command that prints it, its model and, of lines, the type of the first.

A state of ``--save-state`` is for `check` alone.
"""


def schema_of(name: str) -> str:
    """Return the JSON Schema of an output as text.

    Raises:
        KeyError: if there is no such output.
    """
    title, model, first = OUTPUTS[name]
    definition = TypeAdapter(model).json_schema(mode="serialization")
    schema = _plain(definition, definition.get("$defs", {}))
    if first:
        schema = {"oneOf": list(_lines(schema, first, {}))}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rolloutdoctor {title}"}
    return json_text({**head, **schema}, indent=2)


def _plain(schema: Schema, parts: Mapping[str, Schema]) -> dict[str, Any]:
    """The schema with its parts in their places, without titles, of objects with no other fields than those named."""
    if "$ref" in schema:
        return _plain(parts[schema["$ref"].rpartition("/")[2]], parts)
    if schema.get("default", ...) is None:
        # It is left out, not null.
        return _plain(schema["anyOf"][0], parts)
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain(field, parts) for name, field in value.items()}
        elif isinstance(value, dict) and key != "$defs":
            plain[key] = _plain(value, parts)
        elif key in ("anyOf", "prefixItems"):
            plain[key] = [_plain(element, parts) for element in value]
        elif key not in ("$defs", "title", "description", "default"):
            plain[key] = value
    return plain if "properties" not in plain else {"additionalProperties": False, **plain}


def _lines(schema: Schema, kind: str, of: Schema) -> Iterator[Schema]:
    """The schemas of a line and of those that its lists become."""
    lists = {name: schema["properties"][name]["items"] for name in LINES.get(kind, ()) if name in schema["properties"]}
    fields = {name: field for name, field in schema["properties"].items() if name not in lists}
    typed = {"type": {"const": kind}, **of}
    required = [*typed, *(name for name in schema.get("required", ()) if name not in lists)]
    yield {**schema, "properties": {**typed, **fields}, "required": required}
    for name, item in lists.items():
        inner = item if "properties" in item else {**schema, "properties": {"code": item}, "required": ["code"]}
        yield from _lines(inner, LINES[kind][name], {"effect": {"type": "string"}} if kind == "effect" else {})


def listed() -> str:
    """Return the names of the outputs, and what prints them."""
    width = max(map(len, OUTPUTS))
    lines = [f"{name:<{width}}  {title}" for name, (title, *_) in OUTPUTS.items()]
    return "\n".join([*lines, "", "`rolloutdoctor explain schema NAME` prints the JSON Schema of one."])

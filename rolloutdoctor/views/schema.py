"""JSON Schemas (draft 2020-12) of what the commands print with ``--format json`` and ``jsonl``."""

from collections.abc import Mapping
from typing import Any

from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.views.structured import SCHEMA_VERSION

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
BOOL: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
ANY: Schema = {}
URL: Schema = {"type": "string", "pattern": "^https://"}
CODE: Schema = {"type": "string", "pattern": "^RD[A-Z][0-9]{3}$"}
SPLIT: Schema = {"enum": ["train", "eval"]}


def maybe(one: Schema) -> Schema:
    """The value, or null: not defined, not finite, or not there."""
    return {"anyOf": [one, {"type": "null"}]}


def array(item: Schema) -> Schema:
    """A list of values of one kind."""
    return {"type": "array", "items": item}


def mapping(value: Schema) -> Schema:
    """Names to values of one kind."""
    return {"type": "object", "additionalProperties": value}


def record(fields: Mapping[str, Schema], may: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields and no other, besides those it may have."""
    return {
        "type": "object",
        "properties": {**fields, **(may or {})},
        "required": list(fields),
        "additionalProperties": False,
    }


SIZE = record({"rows": COUNT, "steps": COUNT, "groups": COUNT, "tokens": COUNT})
SETTING = record({"value": ANY, "origin": TEXT, "assumed": BOOL})
TRAINER = record({"name": maybe(TEXT), "version": maybe(TEXT), "config": mapping(SETTING)})
MEASURE = record({"value": maybe(NUMBER), "unit": TEXT})
PAIR = record({"before": maybe(NUMBER), "after": maybe(NUMBER)})
HEAD: Mapping[str, Schema] = {"schema_version": {"const": SCHEMA_VERSION}, "rolloutdoctor": TEXT}
RUN: Mapping[str, Schema] = {**HEAD, "device": TEXT, "dtype": TEXT, "input": SIZE, "trainer": TRAINER}

CAUSE = record(
    {
        "hypothesis": TEXT,
        "quantity": TEXT,
        "compared": COUNT,
        "as_recorded": COUNT,
        "as_found": COUNT,
        "worst": maybe(NUMBER),
        "also": array(TEXT),
        "words": TEXT,
        "explains": array(TEXT),
    }
)
PLACE = record({"step": WHOLE, "group_id": maybe(TEXT), "sample_id": maybe(TEXT), "note": maybe(TEXT)})
STEP_VALUES: Schema = {
    "type": "object",
    "properties": {"step": WHOLE, "split": SPLIT},
    "required": ["step"],
    "additionalProperties": maybe(NUMBER),
}
FINDING: Mapping[str, Schema] = {
    "code": CODE,
    "name": TEXT,
    "severity": {"enum": [one.label for one in Severity]},
    "verdict": {"enum": ["confirmed", "exposed"]},
    "follows_from": maybe(CODE),
    "headline": TEXT,
    "message": TEXT,
    "evidence": TEXT,
    "advice": TEXT,
    "measures": mapping(MEASURE),
    "per_step": array(STEP_VALUES),
    "examples": array(PLACE),
    "fix": maybe(TEXT),
    "references": array(URL),
}
NOT_APPLICABLE: Mapping[str, Schema] = {"code": CODE, "name": TEXT, "reason": TEXT}
SKIPPED: Mapping[str, Schema] = {**NOT_APPLICABLE, "remedy": TEXT}
FIRST = record({"step": WHOLE, "sample_id": maybe(TEXT), "logged": maybe(NUMBER), "recomputed": maybe(NUMBER)})
AUDITED = record(
    {"quantity": TEXT, "compared": COUNT, "agree": COUNT, "worst": maybe(NUMBER), "first": maybe(FIRST)},
    {"with": array(TEXT), "not_compared": COUNT, "reason": TEXT, "window": COUNT, "shape": TEXT},
)
EXCLUDED = record(
    {"code": CODE, "effect": TEXT, "bound": NUMBER, "unit": TEXT, "estimate": NUMBER, "limit": NUMBER}
    | {"seen": COUNT, "of": TEXT, "words": TEXT}
)
COVERAGE = record({"rules": COUNT, "tested": COUNT})
REST: Mapping[str, Schema] = {"coverage": COVERAGE, "audit": array(AUDITED), "notes": array(TEXT)}

CHECK = record(
    {
        **RUN,
        "findings": array(record(FINDING, {"cause": CAUSE})),
        "clean": array(CODE),
        "excluded": array(EXCLUDED),
        "not_applicable": array(record(NOT_APPLICABLE)),
        "skipped": array(record(SKIPPED)),
        **REST,
    }
)


def _line(kind: str, fields: Mapping[str, Schema], may: Mapping[str, Schema] | None = None) -> Schema:
    return record({"type": {"const": kind}, **fields}, may)


CHECK_LINE: Schema = {
    "oneOf": [
        _line("run", {**RUN, **REST}),
        _line("finding", FINDING, {"cause": CAUSE}),
        _line("clean", {"code": CODE}, {"excluded": EXCLUDED}),
        _line("not_applicable", NOT_APPLICABLE),
        _line("skipped", SKIPPED),
    ]
}

SLICE: Schema = {
    "type": "object",
    "properties": {"metrics": mapping(PAIR), "step": WHOLE},
    "additionalProperties": {"type": ["number", "string", "null"]},
}
MOVED_ROW = record(
    {
        "sample_id": TEXT,
        "reward": maybe(NUMBER),
        "advantage_before": maybe(NUMBER),
        "advantage_after": maybe(NUMBER),
        "prompt": maybe(TEXT),
        "response": maybe(TEXT),
    }
)
GROUP: Mapping[str, Schema] = {
    "step": WHOLE,
    "split": SPLIT,
    "group_id": TEXT,
    "moved": maybe(NUMBER),
    "rows": COUNT,
    "moved_most": array(MOVED_ROW),
}
EFFECT: Mapping[str, Schema] = {
    "label": TEXT,
    "joint": BOOL,
    "differs": BOOL,
    "remarks": array(TEXT),
    "total": mapping(MEASURE),
    "metrics": mapping(PAIR),
    "moved_by": TEXT,
}
DIFF_HEAD: Mapping[str, Schema] = {**RUN, "by": maybe(TEXT), "differs": BOOL}
DIFF = record(
    {
        **DIFF_HEAD,
        "effects": array(
            record({**EFFECT, "per_step": array(SLICE), "parts": array(SLICE), "groups": array(record(GROUP))})
        ),
        "notes": array(TEXT),
    }
)


def _of_effect(kind: str) -> Schema:
    properties = {"type": {"const": kind}, "effect": TEXT}
    return {**SLICE, "properties": {**SLICE["properties"], **properties}, "required": list(properties)}


DIFF_LINE: Schema = {
    "oneOf": [
        _line("run", {**DIFF_HEAD, "notes": array(TEXT)}),
        _line("effect", EFFECT),
        _of_effect("step"),
        _of_effect("part"),
        _line("group", {"effect": TEXT, **GROUP}),
    ]
}

SIDE = record({"name": TEXT, "input": SIZE, "trainer": record({"name": maybe(TEXT), "version": maybe(TEXT)})})
OUTCOME = record({"outcome": TEXT, "headline": TEXT})
BOTH = {"a": maybe(NUMBER), "b": maybe(NUMBER)}
COMPARED_FINDING: Mapping[str, Schema] = {
    "code": CODE,
    "name": TEXT,
    "a": OUTCOME,
    "b": OUTCOME,
    "measures": mapping(record({**BOTH, "unit": TEXT})),
}
QUANTITY: Mapping[str, Schema] = {
    "name": TEXT,
    "origin": {"enum": ["rows", "recomputed", "logged"]},
    "split": SPLIT,
    "unit": TEXT,
    "steps": COUNT,
    "equal": COUNT,
    **BOTH,
    "difference": maybe(NUMBER),
    "widest_step": maybe(WHOLE),
}
MATCHED = record({"quantity": TEXT, "compared": COUNT, "equal": COUNT, "largest": maybe(NUMBER), "unit": TEXT})
FIRST_DIFFERENCE = record(
    {
        "step": WHOLE,
        "split": SPLIT,
        "quantity": TEXT,
        "sample_id": maybe(TEXT),
        "token": maybe(COUNT),
        **BOTH,
        "rows": COUNT,
        "of": COUNT,
    }
)
COMPARE_HEAD: Mapping[str, Schema] = {
    **HEAD,
    "device": TEXT,
    "dtype": TEXT,
    "a": SIDE,
    "b": SIDE,
    "differs": BOOL,
    "steps": record({"both": COUNT, "only_a": COUNT, "only_b": COUNT}),
    "options": array(record({"name": TEXT, "a": maybe(SETTING), "b": maybe(SETTING)})),
    "joined": COUNT,
    "matched": array(MATCHED),
    "first": maybe(FIRST_DIFFERENCE),
    "by": maybe(TEXT),
    "notes": array(TEXT),
}


def _part(more: Mapping[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {**more, "part": TEXT},
        "required": [*more, "part"],
        "additionalProperties": {"type": "object"},
    }


COMPARE = record(
    {
        **COMPARE_HEAD,
        "findings": array(record(COMPARED_FINDING)),
        "quantities": array(record(QUANTITY)),
        "parts": array(_part({})),
    }
)
COMPARE_LINE: Schema = {
    "oneOf": [
        _line("comparison", COMPARE_HEAD),
        _line("finding", COMPARED_FINDING),
        _line("quantity", QUANTITY),
        _part({"type": {"const": "part"}}),
    ]
}

NUMBERS: Mapping[str, Schema] = {
    name: maybe(NUMBER) for name in ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2")
}
METRICS: Schema = {
    "type": "object",
    "properties": NUMBERS,
    "required": list(NUMBERS),
    "additionalProperties": maybe(NUMBER),
}
STEP_HEAD: Mapping[str, Schema] = {
    "step": WHOLE,
    "split": SPLIT,
    "rows": COUNT,
    "tokens": COUNT,
    "logged": mapping(maybe(NUMBER)),
    "difference": mapping(maybe(NUMBER)),
}


def _step(more: Mapping[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": {**more, **STEP_HEAD, **NUMBERS, "fixed": METRICS},
        "required": [*more, *STEP_HEAD, *NUMBERS],
        "additionalProperties": maybe(NUMBER),
    }


RECOMPUTE_HEAD: Mapping[str, Schema] = {**RUN, "fixes": array(TEXT), "columns": array(TEXT)}
RECOMPUTE = record({**RECOMPUTE_HEAD, "per_step": array(_step({})), "notes": array(TEXT)})
RECOMPUTE_LINE: Schema = {
    "oneOf": [_line("run", {**RECOMPUTE_HEAD, "notes": array(TEXT)}), _step({"type": {"const": "step"}})]
}

OPTIONS = mapping(ANY)
MEMBER: Mapping[str, Schema] = {"trainer": maybe(TEXT), "options": OPTIONS, "words": TEXT}
IDENTIFY = record(
    {
        **HEAD,
        "input": SIZE,
        "stages": array(
            record(
                {
                    "stage": {"enum": ["advantage", "kl", "loss"]},
                    "outcome": TEXT,
                    "compared": COUNT,
                    "classes": array(
                        record(
                            {**MEMBER, "matched": COUNT, "worst": maybe(NUMBER), "equivalent": array(record(MEMBER))}
                        )
                    ),
                    "excluded": array(
                        record(
                            {
                                "options": OPTIONS,
                                "step": maybe(WHOLE),
                                "sample_id": maybe(TEXT),
                                "logged": maybe(NUMBER),
                                "predicted": maybe(NUMBER),
                            }
                        )
                    ),
                    "separate": TEXT,
                }
            )
        ),
        "recorded": TEXT,
        "use": array(TEXT),
    }
)

INFO = record(
    {
        "schema_version": {"const": SCHEMA_VERSION},
        "files": array(TEXT),
        "input": SIZE,
        "splits": mapping(COUNT),
        "dropped_steps": array({"type": "array", "prefixItems": [WHOLE, SPLIT], "minItems": 2, "maxItems": 2}),
        "first_step": maybe(WHOLE),
        "last_step": maybe(WHOLE),
        "tier": COUNT,
        "tier_meaning": TEXT,
        "trainer": maybe(TEXT),
        "config": mapping(SETTING),
        "columns": mapping(TEXT),
        "absent": mapping(TEXT),
        "metrics": array(TEXT),
        "runnable": array(CODE),
        "not_applicable": array(record({"code": CODE, "reason": TEXT})),
        "skipped": array(record({"code": CODE, "reason": TEXT, "remedy": TEXT})),
    }
)

RULE = record(
    {
        "code": CODE,
        "name": TEXT,
        "family": TEXT,
        "summary": TEXT,
        "page": TEXT,
        "measures": array(TEXT),
        "fix": maybe(TEXT),
        "references": array(URL),
    }
)
CAUSES = array(
    record(
        {
            "name": TEXT,
            "code": CODE,
            "rule": TEXT,
            "shows_in": TEXT,
            "words": TEXT,
            "remedy": TEXT,
            "trainers": array(TEXT),
            "references": array(URL),
        }
    )
)
FIXES = array(
    record(
        {
            "name": TEXT,
            "summary": TEXT,
            "story": TEXT,
            "contested": BOOL,
            "trainers": array(TEXT),
            "variants": array(record({"name": TEXT, "note": TEXT, "trainers": array(TEXT)})),
            "references": array(URL),
        }
    )
)
OPTION = record(
    {
        "name": TEXT,
        "default": ANY,
        "takes": TEXT,
        "computed": maybe(array(ANY)),
        "decides": BOOL,
        "meaning": TEXT,
        "changed": maybe(record({"in": TEXT, "before": ANY})),
    }
)
TRAINERS = array(record({"name": TEXT, "version": TEXT, "options": array(OPTION), "not_recomputed": mapping(TEXT)}))

OUTPUTS: Mapping[str, tuple[str, Schema]] = {
    "check": ("check and merge --format json", CHECK),
    "check-line": ("a line of check and merge --format jsonl", CHECK_LINE),
    "diff": ("diff --format json", DIFF),
    "diff-line": ("a line of diff --format jsonl", DIFF_LINE),
    "compare": ("compare --format json", COMPARE),
    "compare-line": ("a line of compare --format jsonl", COMPARE_LINE),
    "recompute": ("recompute --format json", RECOMPUTE),
    "recompute-line": ("a line of recompute --format jsonl", RECOMPUTE_LINE),
    "identify": ("identify --format json", IDENTIFY),
    "info": ("info --format json", INFO),
    "rule": ("rule CODE --format json", RULE),
    "rules": ("rule --format json", array(RULE)),
    "causes": ("causes --format json", CAUSES),
    "fixes": ("fixes --format json", FIXES),
    "trainers": ("trainers --format json", TRAINERS),
}
"""Name of an output to the command that prints it and its schema. A state of ``--save-state`` is for `merge` alone."""


def schema_of(name: str) -> str:
    """Return the JSON Schema of an output as text.

    Raises:
        KeyError: if there is no such output.
    """
    title, schema = OUTPUTS[name]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"rolloutdoctor {title}"}
    return json_text({**head, **schema}, indent=2)


def listed() -> str:
    """Return the names of the outputs, and what prints them."""
    width = max(map(len, OUTPUTS))
    lines = [f"{name:<{width}}  {title}" for name, (title, _) in OUTPUTS.items()]
    return "\n".join([*lines, "", "`rolloutdoctor schema NAME` prints the JSON Schema of one."])

"""A comparison as JSON and JSON Lines: numbers are never rounded; what is not defined or not finite is null."""

from collections.abc import Iterator, Mapping

from rolloutdoctor.results.comparison import Comparison, Effect, MovedGroup, Pair, Slice
from rolloutdoctor.results.escapes import json_text
from rolloutdoctor.results.findings import Measure
from rolloutdoctor.views.structured import SCHEMA_VERSION, known, settings
from rolloutdoctor.views.style import Style


def as_json(result: Comparison, style: Style) -> str:
    """Render the whole comparison as one JSON object."""
    body = {**_head(result), "effects": [_effect(effect) for effect in result.effects], "notes": list(result.notes)}
    return json_text(body, indent=2, ascii_only=not style.unicode) + "\n"


def as_json_lines(result: Comparison, style: Style) -> str:
    """Render one JSON object a line: the run, then every effect with its steps, parts and groups."""

    def lines() -> Iterator[dict[str, object]]:
        yield {"type": "run", **_head(result), "notes": list(result.notes)}
        for effect in result.effects:
            body = _effect(effect)
            inner = [("step", body.pop("per_step")), ("part", body.pop("parts")), ("group", body.pop("groups"))]
            yield {"type": "effect", **body}
            for kind, entries in inner:
                assert isinstance(entries, list)
                for entry in entries:
                    yield {"type": kind, "effect": effect.label, **entry}

    return "".join(json_text(line, ascii_only=not style.unicode) + "\n" for line in lines())


def _head(result: Comparison) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "rolloutdoctor": result.version,
        "device": result.device,
        "dtype": result.dtype,
        "input": vars(result.input),
        "trainer": {"name": result.trainer, "version": result.trainer_version, "config": settings(result.config)},
        "by": result.by,
        "differs": result.differs,
    }


def _effect(effect: Effect) -> dict[str, object]:
    return {
        "label": effect.label,
        "joint": effect.joint,
        "differs": effect.differs,
        "remarks": list(effect.remarks),
        "total": {
            name: {"value": known(measure.value), "unit": measure.unit} for name, measure in effect.total.items()
        },
        "metrics": _pairs(effect.metrics),
        "per_step": [_slice(part) for part in effect.per_step],
        "parts": [_slice(part) for part in effect.parts],
        "moved_by": effect.moved_by,
        "groups": [_group(group) for group in effect.groups],
    }


def _slice(part: Slice) -> dict[str, object]:
    found: dict[str, object] = {**part.where, **_values(part.measures)}
    return {**found, "metrics": _pairs(part.metrics)} if part.metrics else found


def _values(measures: Mapping[str, Measure]) -> dict[str, object]:
    return {name: known(measure.value) for name, measure in measures.items()}


def _pairs(pairs: Mapping[str, Pair]) -> dict[str, object]:
    return {name: {"before": known(pair.before), "after": known(pair.after)} for name, pair in pairs.items()}


def _group(group: MovedGroup) -> dict[str, object]:
    return {
        "step": group.step,
        "split": group.split,
        "group_id": group.group_id,
        "moved": known(group.moved),
        "rows": group.size,
        "moved_most": [
            {
                "sample_id": row.sample_id,
                "reward": known(row.reward),
                "advantage_before": known(row.advantage.before),
                "advantage_after": known(row.advantage.after),
                "prompt": row.prompt,
                "response": row.response,
            }
            for row in group.rows
        ],
    }

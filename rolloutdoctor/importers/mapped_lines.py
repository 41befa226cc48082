"""JSON Lines into canonical columns: each field of a line is checked against the column that it is mapped to."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import DataError

_CHUNK_ROWS = 4096
_ALWAYS = ("step", "group_id", "split")


@dataclass(frozen=True)
class Constant:
    """A value that every row has, such as that of ``--map step=0``."""

    value: object

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class OfPrompt:
    """A group that is told by its prompt, which this field has."""

    field: str


Place = str | Constant | OfPrompt
"""The field or the path in which rows have a column, or the value that all of them have."""


def constant(text: str) -> Constant | None:
    """Return the number or the quoted text that a mapping gives instead of a field; None if it is neither.

    >>> constant("0"), constant('"eval"'), constant("score")
    (Constant(value=0), Constant(value='eval'), None)
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return Constant(value) if is_plain else None


def read_lines(file: Source, sink: base.RunSink, where: Mapping[str, Place], done: int, total: int) -> None:
    """Stream the rows of one file into a sink that has begun.

    Args:
        file: JSON Lines.
        sink: for the rows.
        where: canonical column to its place in the lines.
        done: bytes of the files before this one.
        total: bytes of all files.

    Raises:
        DataError: if a line is no object, or a value does not fit its column; the message names the line.
    """
    for chunk in lines.chunks([file]):
        rows: list[list[object]] = []
        for line in lines.objects_of(chunk):
            if line.body is None:
                sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                continue
            rows.append(
                [cell(name, value_of(line.body, place), f"{line.where}: {place}") for name, place in where.items()]
            )
            if len(rows) == _CHUNK_ROWS:
                _write_rows(file, sink, where, rows)
                rows = []
        _write_rows(file, sink, where, rows)
        sink.advance(done + chunk.bytes_read, total)


def _write_rows(file: Source, sink: base.RunSink, names: Iterable[str], rows: Sequence[Sequence[object]]) -> None:
    if rows:
        sink.write_from(file, dict(zip(names, zip(*rows, strict=True), strict=True)))


def value_of(body: Mapping[str, object], place: Place) -> object:
    """Return what a row has in a place; None if it has nothing there."""
    if isinstance(place, OfPrompt):
        return digest(body.get(place.field))
    return place.value if isinstance(place, Constant) else value_at(body, place)


def digest(prompt: object) -> str:
    """Return a short name of a prompt."""
    return hashlib.blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=8).hexdigest()


def value_at(body: Mapping[str, object], path: str) -> object:
    """Return the value of a field, or at a path such as ``info.score``; None if there is none."""
    if path in body:
        return body[path]
    node: object = body
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return None
        node = node[part]
    return node


def cell(name: str, value: object, where: str) -> object:
    """Check a value of JSON against its column, so that what the writer gets is what it expects.

    Raises:
        DataError: if it does not fit; `where` says in the message where it is.
    """
    column = BY_NAME[name]
    if value is None:
        if name in _ALWAYS:
            raise DataError(f"{where} is missing; every row needs its {name}")
        return None
    if column.kind is Kind.INTEGER:
        place, _, label = where.rpartition(": ")
        return cells.natural({label: value}, label, place)
    if column.kind is Kind.NUMBER:
        return cells.number(value, where)
    if column.kind is Kind.NAMED_NUMBERS:
        if not isinstance(value, dict):
            raise DataError(f"{where} is {cells.shown(value)} where an object of numbers was expected")
        return {key: cells.number(each, f"{where}.{key}") for key, each in value.items()}
    if column.kind is Kind.TURNS:
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise DataError(f"{where} is {cells.shown(value)} where a list of objects was expected")
        return value
    if column.kind in (Kind.IDENTIFIER, Kind.TEXT, Kind.MESSAGES):
        if column.kind is not Kind.MESSAGES and isinstance(value, (dict, list)):
            raise DataError(f"{where} is {cells.shown(value)} where text was expected")
        return str(value).encode("utf-8", "replace").decode()
    return cells.per_token(value, column.kind, where)


def whole_reward(name: str, fields: Sequence[str]) -> str | None:
    """Return the field of the total where a reward is an object of several numbers; None if none is said to be it.

    >>> whole_reward("reward.format", ["reward.format", "reward.total"]), whole_reward("score", ["score", "length"])
    ('reward.total', 'score')
    """
    holder = name.rpartition(".")[0]
    parts = [field for field in fields if field.rpartition(".")[0] == holder]
    if len(parts) < 2 or _OF_REWARDS.search(holder) is None:
        return name
    return next((part for word in _WHOLES for part in parts if word in part.rpartition(".")[2].lower()), None)


_OF_REWARDS = re.compile(r"(?i)reward|score|return")
_WHOLES = ("total", "overall", "final", "combined", "sum")
"""Words in the name of what is made of the parts beside it, the clearest first."""


def total_of_parts(body: Mapping[str, object]) -> str:
    """Return where the total is of a reward that is an object of several numbers; empty if there is none.

    >>> total_of_parts({"step": 3, "reward": {"total": 0.4, "format": 1.0}}), total_of_parts({"reward": {"total": 1.0}})
    ('reward.total', '')
    """
    for name in ("reward", "rewards", "reward_breakdown", "scores"):
        parts = body.get(name)
        if isinstance(parts, dict):
            fields = [f"{name}.{part}" for part, value in parts.items() if type(value) in (int, float)]
            return (whole_reward(fields[0], fields) or "") if len(fields) > 1 else ""
    return ""

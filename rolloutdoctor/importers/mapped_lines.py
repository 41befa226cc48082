"""JSON Lines into canonical columns: many lines at once where Arrow reads them as Python does, else cell by cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.importers import arrow_lines, base, lines
from rolloutdoctor.importers.cells import per_token
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import DataError, SchemaError

_CHUNK_ROWS = 4096
_SAMPLE_BYTES = 2**19
_ALWAYS = ("step", "group_id", "split")


@dataclass(frozen=True)
class _Layout:
    """What lines are expected to hold.

    Attributes:
        fields: name and type of each field.
        names: type of each column of named numbers, with the names that the run file has for it.
    """

    fields: pa.Schema
    names: Mapping[str, pa.DataType]


Tables = Iterator[tuple[lines.Chunk, dict[str, pa.Array] | None]]


class LinesReader:
    """Streams JSON Lines of one layout into a sink.

    Args:
        sink: begun, or to be begun before `add`.
        where: canonical column to the field or the path in which the lines have it.
    """

    def __init__(self, sink: base.Sink, where: Mapping[str, str]) -> None:
        self.sink, self.where = sink, dict(where)
        self._layout: _Layout | None = None
        self._names: dict[str, dict[str, None]] = {}
        self._seen: dict[str, object] = {}
        self._fitted = True

    def add(self, file: Source, done: int, total: int) -> None:
        """Read one file; `done` of `total` bytes were read before it.

        Raises:
            DataError: if a line is no object, or a value does not fit its column; the message names the line.
        """
        for chunk, columns in self._parsed(file):
            fits = columns is not None and self._written(columns)
            if not fits:
                is_first = not self.sink.rows
                if is_first:
                    self._names = {}
                self._one_by_one(file, chunk)
                if is_first or self._layout is None or not self._fitted:
                    # Odd lines here and there say nothing of the next; twice in a row they do.
                    self._layout = self._expected()
            self._fitted = fits
            self.sink.advance(done + chunk.bytes_read, total)

    def _parsed(self, file: Source) -> Tables:
        chunks = lines.chunks(file)
        if self._layout is None:
            # What the first lines hold says what to expect of the others.
            for chunk in chunks:
                self._learn(file, chunk)
                if self._layout is not None:
                    chunks = chain([chunk], chunks)
                else:
                    yield chunk, None
                break
        # Taken here and not in the threads, so that the same lines always go the same way.
        expected = ((chunk, self._layout) for chunk in chunks)
        for (chunk, _), columns in arrow_lines.ahead(self._columns, expected):
            yield chunk, columns

    def _learn(self, file: Source, chunk: lines.Chunk) -> None:
        """Look at the first lines; too few, or some that say too little, leave the chunk to Python."""
        start = chunk.raw[: chunk.raw.find(b"\n", _SAMPLE_BYTES) + 1]
        self._seen, self._names = {}, {}
        try:
            for line in lines.objects_of(replace(chunk, raw=start), file.name):
                for name, path in self.where.items():
                    value = value_at(line.body or {}, path)
                    if value is not None:
                        self._seen.setdefault(name, value)
                    if isinstance(value, dict) and BY_NAME[name].kind is Kind.NAMED_NUMBERS:
                        self._names.setdefault(name, {}).update(dict.fromkeys(value))
        except DataError:
            # Python says it when it reads the chunk.
            return
        if self._seen.keys() == self.where.keys() and all(self._names.values()):
            self._layout = self._expected()

    def _written(self, columns: dict[str, pa.Array]) -> bool:
        try:
            self.sink.write(columns)
        except (DataError, SchemaError):
            # Cell by cell the message names the line.
            return False
        return True

    def _one_by_one(self, file: Source, chunk: lines.Chunk) -> None:
        cells: dict[str, list[object]] = {name: [] for name in self.where}
        self._seen, rows = {}, 0
        for line in lines.objects_of(chunk, file.name):
            if line.body is None:
                self.sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                continue
            at = f"{file.name}, line {line.number}"
            for name, path in self.where.items():
                value = value_at(line.body, path)
                if value is not None and name not in self._seen:
                    self._seen[name] = value
                cells[name].append(cell(name, value, f"{at}: {path}"))
            rows += 1
            if rows % _CHUNK_ROWS == 0:
                self._flush(file, cells)
                cells = {name: [] for name in self.where}
        if rows % _CHUNK_ROWS:
            self._flush(file, cells)

    def _flush(self, file: Source, cells: Mapping[str, Sequence[object]]) -> None:
        write(file, self.sink, cells)
        for name, values in cells.items():
            if BY_NAME[name].kind is Kind.NAMED_NUMBERS and name not in self._names:
                self._names[name] = {key: None for each in values if isinstance(each, dict) for key in each}

    def _expected(self) -> _Layout | None:
        """What the next lines will hold if they are like those that were just read; None if only Python reads them."""
        tree: dict[str, object] = {}
        for name, path in self.where.items():
            type_ = self._type(name, self._seen.get(name))
            here = tree
            *parents, leaf = path.split(".")
            for part in parents:
                inner = here.setdefault(part, {})
                if not isinstance(inner, dict):
                    return None
                here = inner
            if type_ is None or here.setdefault(leaf, type_) != type_:
                return None
        return _Layout(pa.schema(_struct(tree)), {name: self._type(name, {}) for name in self._names})

    def _type(self, name: str, value: object) -> pa.DataType | None:
        kind = BY_NAME[name].kind
        if value is None:
            return pa.null()
        if kind is Kind.NAMED_NUMBERS:
            return pa.struct([(key, pa.float64()) for key in self._names.get(name, ())])
        return _json_type(kind, value)

    def _columns(self, given: tuple[lines.Chunk, _Layout | None]) -> dict[str, pa.Array] | None:
        chunk, layout = given
        if layout is None:
            return None
        # The name of a field may hold dots of its own, and then goes before a path.
        paths = [path for path in self.where.values() if "." in path]
        closed = any(BY_NAME[name].kind is Kind.NAMED_NUMBERS for name in self.where)
        table = arrow_lines.parsed(chunk.raw, layout.fields, closed=closed, without=paths)
        if table is None:
            return None
        found: dict[str, pa.Array] = {}
        for name, path in self.where.items():
            first, *rest = path.split(".")
            array = table.column(first).combine_chunks()
            column = _canonical(name, pc.struct_field(array, rest) if rest else array)
            if column is None or column.type != layout.names.get(name, column.type):
                return None
            found[name] = column
        return found


def value_at(body: Mapping[str, object], path: str) -> object:
    """Return the value of a field, or at a path such as ``info.score``; None if there is none."""
    if path in body:
        return body[path]
    here: object = body
    for part in path.split("."):
        if not isinstance(here, dict) or part not in here:
            return None
        here = here[part]
    return here


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
        return lines.natural({label: value}, label, place)
    if column.kind is Kind.NUMBER:
        return lines.number(value, where)
    if column.kind is Kind.NAMED_NUMBERS:
        if not isinstance(value, dict):
            raise DataError(f"{where} is {lines.shown(value)} where an object of numbers was expected")
        return {key: lines.number(each, f"{where}.{key}") for key, each in value.items()}
    if column.kind in (Kind.IDENTIFIER, Kind.TEXT, Kind.MESSAGES):
        if column.kind is not Kind.MESSAGES and isinstance(value, (dict, list)):
            raise DataError(f"{where} is {lines.shown(value)} where text was expected")
        return str(value).encode("utf-8", "replace").decode()
    return per_token(value, column.kind, where)


def write(file: Source, sink: base.Sink, cells: Mapping[str, Sequence[object]]) -> None:
    """Write rows that come from `file`, so that the message of an error names it."""
    try:
        sink.write(cells)
    except DataError as error:
        message = str(error).removeprefix(f"{sink.path}: ")
        raise DataError(f"{file.name}: {message}") from None


def _json_type(kind: Kind, value: object) -> pa.DataType | None:
    """What a column that holds `value` is read as; None if only Python reads it."""
    if kind.per_token:
        if not isinstance(value, list):
            return None
        if kind is Kind.FLOATS:
            return pa.list_(pa.float64())
        return pa.list_(pa.bool_() if value and isinstance(value[0], bool) else pa.int64())
    if isinstance(value, str):
        return None if kind in (Kind.INTEGER, Kind.NUMBER) else pa.string()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is Kind.NUMBER:
        return pa.float64()
    return pa.int64() if isinstance(value, int) and kind in (Kind.INTEGER, Kind.IDENTIFIER) else None


def _struct(tree: Mapping[str, object]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_struct(inner)) if isinstance(inner, dict) else inner) for name, inner in tree.items()
    ]


def _canonical(name: str, array: pa.Array) -> pa.Array | None:
    """Make of parsed values what `cell` makes of them one by one; None if one does not fit."""
    kind = BY_NAME[name].kind
    if array.null_count and name in _ALWAYS:
        return None
    if types.is_null(array.type):
        return array
    if kind is Kind.INTEGER and (pc.min(array).as_py() or 0) < 0:
        return None
    if kind is Kind.IDENTIFIER:
        return array.cast(pa.string())
    if not kind.per_token:
        return array
    values = array.values
    if kind is Kind.FLOATS:
        values = pc.fill_null(values, np.nan) if values.null_count else values
    elif values.null_count:
        return None
    elif types.is_boolean(values.type):
        values = values.cast(pa.int64())
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(array.offsets, values, mask=mask)

"""JSON Lines a row at a time, with arrays in place of long lists: parsed by Arrow, or by Python where that is safer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rolloutdoctor.errors import InputError
from rolloutdoctor.importers import arrow_lines, lines
from rolloutdoctor.io.paths import Source

T = TypeVar("T")
Body = dict[str, object]


@dataclass(frozen=True)
class Layout:
    """What the lines of one file are expected to hold.

    Attributes:
        fields: name and type of each field that is looked at.
        optional: names of those that a line may lack, or have null.
        gaps: names of those whose lists may hold null, which is NaN.
        blank: names of those that lines lack, or have lists of nothing but null for; their cells are None.
        without: names of fields that no line may have.
    """

    fields: pa.Schema
    optional: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


Expecting = Callable[[Mapping[str, object]], Layout | None]


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        where: file and line, for messages.
        body: its object, with lists of numbers as arrays perhaps; None for a last line that was not written to its end.
        plain: returns the object as Python reads it; None if that is what `body` is.
    """

    where: str
    body: Body | None
    plain: Callable[[], Body] | None = None

    def made(self, make: Callable[[Body, str], T]) -> T:
        """Return what `make` makes of the object; if it refuses, it does so in view of the object as Python reads it.

        Raises:
            InputError: if `make` does.
        """
        assert self.body is not None  # a torn line makes nothing
        if self.plain is None:
            return make(self.body, self.where)
        try:
            return make(self.body, self.where)
        except InputError:
            return make(self.plain(), self.where)


@dataclass(frozen=True)
class Part:
    """Some lines of a file.

    Attributes:
        file: that they are in.
        rows: one for each line that is not empty.
        bytes_read: of all files, up to the end of these lines.
    """

    file: Source
    rows: Iterator[Row]
    bytes_read: int


def parts(files: Iterable[Source], layout: Expecting) -> Iterator[Part]:
    """Yield the lines of some files in their order; the next ones are parsed meanwhile, in threads.

    Args:
        files: to be read.
        layout: says what the lines of a file hold, given the object of the first; None if Python had better read them.

    Raises:
        InputError: if a file cannot be read, or a line is no object; the message names it.
    """
    for (file, chunk, _, read), table in arrow_lines.ahead(_table, _chunks(files, layout)):
        rows = _by_python(file, chunk) if table is None else _Table(file, chunk, *table).rows()
        yield Part(file, rows, read)


def leaf_type(value: object) -> pa.DataType:
    """Return the type of the numbers in nested lists: truth values if the first is one, else float64.

    >>> leaf_type([[], True])
    DataType(double)
    >>> leaf_type([[True]])
    DataType(bool)
    """
    while isinstance(value, list) and value:
        value = value[0]
    return pa.bool_() if isinstance(value, bool) else pa.float64()


Item = tuple[Source, lines.Chunk, Layout | None, int]


def _chunks(files: Iterable[Source], layout: Expecting) -> Iterator[Item]:
    done = 0
    for file in files:
        found: Layout | None = None
        size = 0
        for chunk in lines.chunks(file):
            if chunk.first == 1:
                first = lines.parse(chunk.raw[: chunk.raw.find(b"\n") + 1])
                found = None if first is None else layout(first)
            size = chunk.bytes_read
            yield file, chunk, found, done + size
        done += size


def _table(item: Item) -> tuple[pa.Table, Layout] | None:
    _, chunk, layout, _ = item
    table = None if layout is None else arrow_lines.parsed(chunk.raw, layout.fields, without=layout.without)
    return None if table is None or layout is None else (table, layout)


def _by_python(file: Source, chunk: lines.Chunk) -> Iterator[Row]:
    for line in lines.objects_of(chunk, file.name):
        yield Row(f"{file.name}, line {line.number}", line.body)


class _Table:
    """The rows of parsed lines."""

    def __init__(self, file: Source, chunk: lines.Chunk, table: pa.Table, layout: Layout) -> None:
        self.file, self.chunk, self.table, self.layout = file, chunk, table, layout

    @cached_property
    def _raw(self) -> list[bytes]:
        return self.chunk.raw.split(b"\n")

    def rows(self) -> Iterator[Row]:
        """Yield one row for each line; those that lack something are as Python reads them."""
        columns: dict[str, list[object]] = {}
        odd = np.zeros(len(self.table), bool)
        for name in self.table.column_names:
            array = self.table.column(name).combine_chunks()
            if name in self.layout.blank:
                columns[name] = [None] * len(odd)
                if array.values.null_count < len(array.values):
                    odd |= _holding(np.from_dlpack(array.offsets), ~_nulls(array.values))
                continue
            columns[name], lacks = _cells(array, name in self.layout.gaps)
            odd |= lacks if name not in self.layout.optional else lacks & ~_nulls(array)
        for place in range(len(odd)):
            where = f"{self.file.name}, line {self.chunk.first + place}"
            if odd[place]:
                yield Row(where, self._plain(place))
            else:
                body = {name: cells[place] for name, cells in columns.items()}
                yield Row(where, body, lambda place=place: self._plain(place))  # type: ignore[misc]  # bound at once

    def _plain(self, place: int) -> Body:
        body = lines.parse(self._raw[place])
        assert body is not None  # Arrow has read it, and `json_bytes` found nothing to doubt
        return body


def _nulls(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_null()) if array.null_count else np.zeros(len(array), bool)


def _cells(array: pa.Array, gaps: bool) -> tuple[list[object], np.ndarray]:
    """Return the cells of a column, and which of them hold a null that is not a gap."""
    lacks = _nulls(array)
    if not types.is_list(array.type):
        return array.to_pylist(), lacks
    values = array.values
    if types.is_string(values.type) or types.is_null(values.type):
        return array.to_pylist(), lacks
    starts = np.from_dlpack(array.offsets)
    if types.is_list(values.type):
        inner, bad = _cells(values, gaps)
        found: list[object] = [inner[start:stop] for start, stop in pairwise(starts)]
    else:
        flat = _numbers(values)
        found = [flat[start:stop] for start, stop in pairwise(starts)]
        bad = np.zeros(0, bool) if gaps or not values.null_count else _nulls(values)
    if bad.any():
        lacks = lacks | _holding(starts, bad)
    if array.null_count:
        found = [None if null else cell for cell, null in zip(found, _nulls(array), strict=True)]
    return found, lacks


def _holding(starts: np.ndarray, is_marked: np.ndarray) -> np.ndarray:
    """Return which lists hold a marked value."""
    counts = np.concatenate([[0], np.cumsum(is_marked)])
    found: np.ndarray = counts[starts[1:]] > counts[starts[:-1]]
    return found


def _numbers(values: pa.Array) -> np.ndarray:
    if types.is_boolean(values.type):
        return np.from_dlpack(pc.fill_null(values, False).cast(pa.uint8())).view(bool)
    if values.null_count:
        values = pc.fill_null(values, np.nan if types.is_floating(values.type) else 0)
    return np.from_dlpack(values)

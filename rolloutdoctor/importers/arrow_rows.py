"""JSON Lines a row at a time, with arrays in place of long lists: parsed by Arrow, or by Python where that is safer."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import pyarrow as pa

from rolloutdoctor.importers import arrow_lines, lines
from rolloutdoctor.importers.arrow_cells import Layout, Unsure, cells_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError

T = TypeVar("T")
Body = dict[str, object]


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
        rows = _by_python(file, chunk) if table is None else table.rows()
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


def _table(item: Item) -> "_Table | None":
    file, chunk, layout, _ = item
    table = None if layout is None else arrow_lines.parsed(chunk.raw, layout.fields, without=layout.without)
    if table is None or layout is None:
        return None
    try:
        return _Table(file, chunk, *cells_of(table, layout, chunk.raw))
    except Unsure:
        return None


def _by_python(file: Source, chunk: lines.Chunk) -> Iterator[Row]:
    for line in lines.objects_of(chunk, file.name):
        yield Row(f"{file.name}, line {line.number}", line.body)


class _Table:
    """The rows of parsed lines: their cells by column, and which of them Python has to read."""

    def __init__(self, file: Source, chunk: lines.Chunk, columns: dict[str, list[object]], odd: np.ndarray) -> None:
        self.file, self.chunk, self.columns, self.odd = file, chunk, columns, odd

    @cached_property
    def _raw(self) -> list[bytes]:
        return self.chunk.raw.split(b"\n")

    def rows(self) -> Iterator[Row]:
        """Yield one row for each line; those that lack something are as Python reads them."""
        for place, is_odd in enumerate(self.odd):
            where = f"{self.file.name}, line {self.chunk.first + place}"
            if is_odd:
                yield Row(where, self._plain(place))
            else:
                body = {name: cells[place] for name, cells in self.columns.items()}
                yield Row(where, body, partial(self._plain, place))

    def _plain(self, place: int) -> Body:
        body = lines.parse(self._raw[place])
        assert body is not None  # Arrow has read it, and `json_bytes` found nothing to doubt
        return body

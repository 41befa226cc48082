"""What a Parquet footer says of each column chunk, without pyarrow: it aborts the process on some damaged footers.

The footer is a struct of Thrift's compact protocol, and only its few fields that tell sizes are looked at; see
parquet.thrift of Apache Parquet for their numbers.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from rolloutdoctor.data.schema import METADATA_KEY
from rolloutdoctor.io.locations.stores import open_bytes
from rolloutdoctor.io.parquet.thrift import BINARY, INT32, INTEGERS, LIST, SHORT, STRUCT, Cursor, Recorder

DELTA_BYTE_ARRAY = 7

_ROW_GROUPS, _KEY_VALUES, _COLUMNS, _META_DATA = 4, 5, 1, 3
_ENCODINGS, _NUM_VALUES, _UNCOMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE, _STATISTICS = 2, 5, 6, 9, 11, 12
_OLD_MAX, _OLD_MIN, _NULL_COUNT, _MAX, _MIN = 1, 2, 3, 5, 6

_LONGEST_END = SHORT
"""Bytes of a smallest or largest value that is kept: a number or a short word."""

_WORTH_PATTERNS = 256
"""Row groups of a file whose columns are read by patterns; to make one takes the time of reading a hundred columns."""

_MOST_PATTERNS = 4
"""Patterns that are made for a column: one more each time that it has other fields."""

_LONGEST_COLUMN = 2**12
"""Bytes of a column of which a pattern is made: a sound one has some 200."""


class Chunk(NamedTuple):
    """One column of one row group.

    Attributes:
        values: how many it has.
        uncompressed: their bytes before compression.
        start: where its first page is in the file.
        encodings: of its pages.
        ends: the smallest and the largest value as stored, of a chunk that says it has no null; None if it does not
            say all of that.
    """

    values: int
    uncompressed: int
    start: int
    encodings: tuple[int, ...]
    ends: tuple[bytes, bytes] | None = None


def read_chunks(path: str) -> list[list[Chunk]]:
    """Return the chunks of every row group of a file, in the order of its columns.

    Raises:
        ValueError: if the footer is damaged.
        OSError: if the file cannot be read.
    """
    with open_bytes(path) as file:
        size = int(file.size())
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        if not 0 < length <= size - 12:
            raise ValueError("its length is wrong")
        file.seek(size - 8 - length)
        raw = file.read(length)
    try:
        cursor = Cursor(raw)
        groups: list[list[Chunk]] = []
        for field, kind in cursor.fields():
            if (field, kind) == (_ROW_GROUPS, LIST):
                groups += _row_groups(cursor)
            elif (field, kind) == (_KEY_VALUES, LIST):
                keys = list(_keys(cursor))
                if keys.count(METADATA_KEY.encode()) > 1:
                    raise ValueError(f"two entries {METADATA_KEY!r} in its metadata")
            else:
                cursor.skip(kind)
        return groups
    except IndexError:
        raise ValueError("it ends too early") from None


def _keys(cursor: Cursor) -> Iterator[bytes | int]:
    for _ in cursor.items(STRUCT):
        for field, kind in cursor.fields():
            if (field, kind) == (1, BINARY):
                yield cursor.binary()
            else:
                cursor.skip(kind)


def _row_groups(cursor: Cursor) -> list[list[Chunk]]:
    several = cursor.items(STRUCT)
    patterns = _Patterns() if len(several) >= _WORTH_PATTERNS else None
    return [_row_group(cursor, patterns) for _ in several]


def _row_group(cursor: Cursor, patterns: "_Patterns | None") -> list[Chunk]:
    chunks: list[Chunk] = []
    for field, kind in cursor.fields():
        if (field, kind) != (_COLUMNS, LIST):
            cursor.skip(kind)
            continue
        chunks += [
            _chunk(_column(cursor)) if patterns is None else patterns.chunk(cursor, place)
            for place in cursor.items(STRUCT)
        ]
    return chunks


class _Column(NamedTuple):
    """What a column chunk says of itself, None where it does not; of a `Recorder` the numbers of the gaps."""

    values: int | None = None
    uncompressed: int | None = None
    data: int | None = None
    dictionary: int | None = None
    nulls: int | None = None
    low: bytes | int | None = None
    high: bytes | int | None = None
    encodings: tuple[int, ...] = ()


def _column(cursor: Cursor) -> _Column:
    found: dict[str, Any] = {}
    for outer, outer_kind in cursor.fields():
        if (outer, outer_kind) != (_META_DATA, STRUCT):
            cursor.skip(outer_kind)
            continue
        for field, kind in cursor.fields():
            if field == _NUM_VALUES and kind != LIST:
                found["values"] = cursor.integer()
            elif field == _UNCOMPRESSED and kind != LIST:
                found["uncompressed"] = cursor.integer()
            elif field == _DATA_PAGE and kind != LIST:
                found["data"] = cursor.integer()
            elif field == _DICTIONARY_PAGE and kind != LIST:
                found["dictionary"] = cursor.integer()
            elif (field, kind) == (_ENCODINGS, LIST):
                found["encodings"] = tuple(cursor.integer() for _ in cursor.items(INT32))
            elif (field, kind) == (_STATISTICS, STRUCT):
                found |= _ends(cursor)
            else:
                cursor.skip(kind)
    return _Column(**found)


def _ends(cursor: Cursor) -> dict[str, Any]:
    found: dict[int, Any] = {}
    for field, kind in cursor.fields():
        if kind == BINARY and field in (_OLD_MAX, _OLD_MIN, _MAX, _MIN):
            found[field] = cursor.binary()
        elif field == _NULL_COUNT and kind in INTEGERS:
            found[field] = cursor.integer()
        else:
            cursor.skip(kind)
    low, high = found.get(_MIN, found.get(_OLD_MIN)), found.get(_MAX, found.get(_OLD_MAX))
    return {"nulls": found.get(_NULL_COUNT), "low": low, "high": high}


def _chunk(column: _Column) -> Chunk:
    values, uncompressed, data, dictionary, nulls, low, high, encodings = column
    values, uncompressed, start = values or 0, uncompressed or 0, data or 0
    # As Arrow has it.
    start = dictionary if dictionary is not None and 0 < dictionary < start else start
    if values < 0 or uncompressed < 0 or start < 0:
        raise ValueError("a size in it is negative")
    if nulls != 0 or not isinstance(low, bytes) or not isinstance(high, bytes):
        return Chunk(values, uncompressed, start, encodings)
    if max(len(low), len(high)) > _LONGEST_END:
        return Chunk(values, uncompressed, start, encodings)
    return Chunk(values, uncompressed, start, encodings, (low, high))


class _Pattern:
    """The bytes of one column chunk with gaps where its values stand: others with the same fields match it."""

    def __init__(self, raw: bytes, start: int) -> None:
        recorder = Recorder(raw, start)
        column = _column(recorder)
        wanted = sorted({gap for gap in (*column[:-1], *column.encodings) if gap is not None})
        group = {gap: number for number, gap in enumerate(wanted)}
        parts, at = [], start
        for gap, (begin, end, holds) in enumerate(recorder.gaps):
            parts += [re.escape(raw[at:begin]), b"(%b)" % holds if gap in group else b"(?:%b)" % holds]
            at = end
        self._pattern = re.compile(b"".join([*parts, re.escape(raw[at : recorder.at])]), re.DOTALL)
        self._groups = [None if gap is None else group[gap] for gap in column[:7]]
        self._encodings = [group[gap] for gap in column.encodings]

    def read(self, cursor: Cursor, number: Callable[[bytes], int]) -> Chunk | None:
        """Read a column chunk; None if it does not match."""
        found = self._pattern.match(cursor.raw, cursor.at)
        if found is None:
            return None
        cursor.at = found.end()
        given = found.groups()
        *numbers, low, high = [None if one is None else given[one] for one in self._groups]
        values, uncompressed, data, dictionary, nulls = [None if raw is None else number(raw) for raw in numbers]
        # A text that is short enough to be kept has one byte for its length.
        ends = (low and low[1:], high and high[1:])
        encodings = tuple([number(given[one]) for one in self._encodings])
        return _chunk(_Column(values, uncompressed, data, dictionary, nulls, *ends, encodings))


class _Patterns:
    """Reads the columns of many row groups, nearly all of which say the same things in the same order."""

    def __init__(self) -> None:
        self._known: dict[int, _Pattern] = {}
        self._made: dict[int, int] = {}
        self._number = cache(lambda raw: Cursor(raw).zigzag())

    def chunk(self, cursor: Cursor, place: int) -> Chunk:
        """Read the chunk of a column, the field of which begins here."""
        found = self._known[place].read(cursor, self._number) if place in self._known else None
        if found is None:
            start = cursor.at
            found = _chunk(_column(cursor))
            self._made[place] = self._made.get(place, 0) + 1
            if self._made[place] <= _MOST_PATTERNS and cursor.at - start <= _LONGEST_COLUMN:
                self._known[place] = _Pattern(cursor.raw, start)
        return found

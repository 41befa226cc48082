"""What a Parquet footer says of each column chunk, without pyarrow: it aborts the process on some damaged footers.

The footer is a struct of Thrift's compact protocol, and only its few fields that tell sizes are looked at; see
parquet.thrift of Apache Parquet for their numbers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rolloutdoctor.io.locations.stores import open_bytes

DELTA_BYTE_ARRAY = 7

_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3
_ENCODINGS, _NUM_VALUES, _UNCOMPRESSED, _STATISTICS = 2, 5, 6, 12
_OLD_MAX, _OLD_MIN, _NULL_COUNT, _MAX, _MIN = 1, 2, 3, 5, 6
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_DEEPEST = 32


_LONGEST_END = 64
"""Bytes of a smallest or largest value that is kept: a number or a short word."""


class Chunk(NamedTuple):
    """One column of one row group.

    Attributes:
        values: how many it has.
        uncompressed: their bytes before compression.
        encodings: of its pages.
        ends: the smallest and the largest value as stored, of a chunk that says it has no null; None if it does not
            say all of that.
    """

    values: int
    uncompressed: int
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
        cursor = _Cursor(raw)
        groups: list[list[Chunk]] = []
        for field, kind in cursor.fields():
            if (field, kind) == (_ROW_GROUPS, _LIST):
                groups += [_row_group(cursor) for _ in cursor.items(_STRUCT)]
            else:
                cursor.skip(kind)
        return groups
    except IndexError:
        raise ValueError("it ends too early") from None


def _row_group(cursor: "_Cursor") -> list[Chunk]:
    chunks: list[Chunk] = []
    for field, kind in cursor.fields():
        if (field, kind) == (_COLUMNS, _LIST):
            chunks += [_column(cursor) for _ in cursor.items(_STRUCT)]
        else:
            cursor.skip(kind)
    return chunks


def _column(cursor: "_Cursor") -> Chunk:
    values, uncompressed = 0, 0
    encodings: tuple[int, ...] = ()
    ends = None
    for outer, outer_kind in cursor.fields():
        if (outer, outer_kind) != (_META_DATA, _STRUCT):
            cursor.skip(outer_kind)
            continue
        for field, kind in cursor.fields():
            if field == _NUM_VALUES and kind != _LIST:
                values = cursor.integer()
            elif field == _UNCOMPRESSED and kind != _LIST:
                uncompressed = cursor.integer()
            elif (field, kind) == (_ENCODINGS, _LIST):
                encodings = tuple(cursor.integer() for _ in cursor.items(5))
            elif (field, kind) == (_STATISTICS, _STRUCT):
                ends = _ends(cursor)
            else:
                cursor.skip(kind)
    if values < 0 or uncompressed < 0:
        raise ValueError("a size in it is negative")
    return Chunk(values, uncompressed, encodings, ends)


def _ends(cursor: "_Cursor") -> tuple[bytes, bytes] | None:
    found: dict[int, bytes] = {}
    nulls = None
    for field, kind in cursor.fields():
        if kind == _BINARY and field in (_OLD_MAX, _OLD_MIN, _MAX, _MIN):
            found[field] = cursor.binary()
        elif field == _NULL_COUNT and kind in _INTEGERS:
            nulls = cursor.integer()
        else:
            cursor.skip(kind)
    low, high = found.get(_MIN, found.get(_OLD_MIN)), found.get(_MAX, found.get(_OLD_MAX))
    if nulls != 0 or low is None or high is None or max(len(low), len(high)) > _LONGEST_END:
        return None
    return low, high


class _Cursor:
    """A place in the bytes of a footer. A byte that is not there raises IndexError."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def varint(self) -> int:
        raw, at = self.raw, self.at
        value, shift = 0, 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                self.at = at
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number in it is too long")

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        length = self.varint()
        start, self.at = self.at, self.at + length
        return self.raw[start : self.at]

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield number and type of each field of a struct; the caller reads or skips the value."""
        number = 0
        while True:
            head = self.raw[self.at]
            self.at += 1
            if head == 0:
                return
            number = number + (head >> 4) if head >> 4 else self.integer()
            yield number, head & 0x0F

    def items(self, kind: int) -> range:
        """Read the head of a list, of which every item has to be of a kind."""
        head = self.raw[self.at]
        self.at += 1
        count = head >> 4 if head >> 4 < 15 else self.varint()
        if count > len(self.raw) or (count and head & 0x0F != kind):
            raise ValueError("a list in it is not what it should be")
        return range(count)

    def skip(self, kind: int, depth: int = 0) -> None:
        """Pass over a value."""
        if depth > _DEEPEST:
            raise ValueError("it is nested too deep")
        if kind in (_TRUE, _FALSE):
            return
        if kind == _BYTE:
            self.at += 1
        elif kind in _INTEGERS:
            self.varint()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            self.binary()
        elif kind in (_LIST, _SET):
            inner = self.raw[self.at] & 0x0F
            for _ in self.items(inner):
                self.skip(_BYTE if inner in (_TRUE, _FALSE) else inner, depth + 1)
        elif kind == _MAP:
            self._skip_map(depth)
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        else:
            raise ValueError("a type in it is unknown")

    def _skip_map(self, depth: int) -> None:
        count = self.varint()
        if count > len(self.raw):
            raise ValueError("a map in it is not what it should be")
        if count:
            kinds = self.raw[self.at]
            self.at += 1
            for _ in range(count):
                for kind in (kinds >> 4, kinds & 0x0F):
                    self.skip(_BYTE if kind in (_TRUE, _FALSE) else kind, depth + 1)

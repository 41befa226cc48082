"""Parquet footers, read without pyarrow, which aborts the process on some damaged ones.

The footer is a struct of Thrift's compact protocol, and only its few fields that tell sizes are looked at; see
parquet.thrift of Apache Parquet for their numbers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rolloutdoctor.data.schema import METADATA_KEY
from rolloutdoctor.io.locations.stores import open_bytes
from rolloutdoctor.io.parquet.thrift import BINARY, INT32, INTEGERS, LIST, STRUCT, Cursor

DELTA_BYTE_ARRAY = 7

_ROW_GROUPS, _KEY_VALUES, _COLUMNS, _META_DATA = 4, 5, 1, 3
_ENCODINGS, _STATISTICS = 2, 12
_SIZES = _NUM_VALUES, _UNCOMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 5, 6, 9, 11
_OLD_MAX, _OLD_MIN, _NULL_COUNT, _MAX, _MIN = 1, 2, 3, 5, 6

_LONGEST_END = 64
"""Bytes of a smallest or largest value that is kept: a number or a short word."""


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
                groups += [_row_group(cursor) for _ in cursor.items(STRUCT)]
            elif (field, kind) == (_KEY_VALUES, LIST):
                keys = list(_keys(cursor))
                if keys.count(METADATA_KEY.encode()) > 1:
                    raise ValueError(f"two entries {METADATA_KEY!r} in its metadata")
            else:
                cursor.skip(kind)
        return groups
    except IndexError:
        raise ValueError("it ends too early") from None


def _keys(cursor: Cursor) -> Iterator[bytes]:
    for _ in cursor.items(STRUCT):
        for field, kind in cursor.fields():
            if (field, kind) == (1, BINARY):
                yield cursor.binary()
            else:
                cursor.skip(kind)


def _row_group(cursor: Cursor) -> list[Chunk]:
    chunks: list[Chunk] = []
    for field, kind in cursor.fields():
        if (field, kind) == (_COLUMNS, LIST):
            chunks += [_chunk(cursor) for _ in cursor.items(STRUCT)]
        else:
            cursor.skip(kind)
    return chunks


def _chunk(cursor: Cursor) -> Chunk:
    sizes: dict[int, int] = {}
    encodings: tuple[int, ...] = ()
    ends = None
    for outer, outer_kind in cursor.fields():
        if (outer, outer_kind) != (_META_DATA, STRUCT):
            cursor.skip(outer_kind)
            continue
        for field, kind in cursor.fields():
            if field in _SIZES and kind != LIST:
                sizes[field] = cursor.zigzag()
            elif (field, kind) == (_ENCODINGS, LIST):
                encodings = tuple(cursor.zigzag() for _ in cursor.items(INT32))
            elif (field, kind) == (_STATISTICS, STRUCT):
                ends = _ends(cursor)
            else:
                cursor.skip(kind)
    values, uncompressed, start, dictionary = (sizes.get(field, 0) for field in _SIZES)
    # As Arrow has it.
    start = dictionary if 0 < dictionary < start else start
    if values < 0 or uncompressed < 0 or start < 0:
        raise ValueError("a size in it is negative")
    return Chunk(values, uncompressed, start, encodings, ends)


def _ends(cursor: Cursor) -> tuple[bytes, bytes] | None:
    bounds: dict[int, bytes] = {}
    nulls = None
    for field, kind in cursor.fields():
        if kind == BINARY and field in (_OLD_MAX, _OLD_MIN, _MAX, _MIN):
            bounds[field] = cursor.binary()
        elif field == _NULL_COUNT and kind in INTEGERS:
            nulls = cursor.zigzag()
        else:
            cursor.skip(kind)
    low, high = bounds.get(_MIN, bounds.get(_OLD_MIN)), bounds.get(_MAX, bounds.get(_OLD_MAX))
    if nulls != 0 or low is None or high is None or max(len(low), len(high)) > _LONGEST_END:
        return None
    return low, high

"""Whether the pages of a column hold what the footer says: a few bytes of a page may declare any number of values.

Arrow believes a page: one that declares 2^28 values of a repeated number takes gigabytes, whatever the footer says.
"""

import re
from functools import lru_cache

import pyarrow as pa

from rolloutdoctor.io.parquet.footer import Chunk
from rolloutdoctor.io.parquet.thrift import INT32, STRUCT, Cursor

_TYPE, _UNCOMPRESSED, _COMPRESSED, _DATA, _DICTIONARY, _DATA_2 = 1, 2, 3, 5, 7, 8
_DICTIONARY_TYPE, _COUNTED = 2, {0: _DATA, 3: _DATA_2}
_COUNT = 1

_HEADER_BYTES = 2**12
"""Read at a time; a header is some 50 bytes, and as long as the smallest and largest text of its page."""

_LONGEST_HEADER = 2**24
"""As Arrow has it."""

_NUMBER = rb"([\x80-\xff]{0,4}[\x00-\x7f])"
_SIZES = rb"\x15%b\x15%b(?:\x15%b)?" % (_NUMBER, _NUMBER, _NUMBER)
_DATA_PAGE = re.compile(rb"\x15\x00%b[\x1c\x2c]\x15%b" % (_SIZES, _NUMBER))
_DICTIONARY_PAGE = re.compile(rb"\x15\x04%b[\x3c\x4c]\x15%b\x15%b[\x11\x12]?\x00\x00" % (_SIZES, _NUMBER, _NUMBER))
"""Headers as nearly all write them, the first without its end; to read them by fields takes ten times as long."""


def check_chunk(file: pa.NativeFile, chunk: Chunk) -> None:
    """Insist on as many values as the footer says, in as many bytes at most, as far as Arrow would read pages.

    Raises:
        ValueError: if a page declares more.
    """
    at, read, window, begin = chunk.start, 0, b"", 0
    while read < chunk.values:
        size, length = _HEADER_BYTES, 0
        while not length:
            if not begin <= at < begin + len(window) or size > _HEADER_BYTES:
                begin, window = at, file.read_at(size, at)
            try:
                uncompressed, compressed, entries, values, length = _header(window, at - begin, chunk.values - read)
            except IndexError:
                if size > _LONGEST_HEADER or (size > len(window) and begin == at):
                    # It ends too early, which Arrow says, too.
                    return
                size *= 8
        # An entry of a dictionary has a byte at least.
        if not (0 <= entries <= uncompressed <= chunk.uncompressed and compressed >= 0 <= values):
            raise ValueError("a page declares more bytes than its column")
        read += values
        if read > chunk.values:
            raise ValueError("a page declares more values than its column")
        at += length + compressed


def _header(raw: bytes, at: int, last: int) -> tuple[int, int, int, int, int]:
    """Uncompressed and compressed bytes of a page, entries of a dictionary, values, and bytes of its header.

    The header of a page with the `last` values need not be read to its end.
    """
    match = _DATA_PAGE.match(raw, at)
    if match is not None and _number(match[4]) == last:
        return _number(match[1]), _number(match[2]), 0, last, 1
    match = _DICTIONARY_PAGE.match(raw, at)
    if match is not None:
        return _number(match[1]), _number(match[2]), _number(match[4]), 0, match.end() - at
    cursor = Cursor(raw)
    cursor.at = at
    sizes: dict[int, int] = {}
    for field, kind in cursor.fields():
        if kind == INT32 and field in (_TYPE, _UNCOMPRESSED, _COMPRESSED):
            sizes[field] = cursor.zigzag()
        elif kind == STRUCT and field in (_DATA, _DICTIONARY, _DATA_2):
            for inner, inner_kind in cursor.fields():
                if (inner, inner_kind) == (_COUNT, INT32):
                    sizes[field] = cursor.zigzag()
                else:
                    cursor.skip(inner_kind)
        else:
            cursor.skip(kind)
    if cursor.at > len(raw):
        raise IndexError
    kind = sizes.get(_TYPE, 0)
    values = sizes.get(_COUNTED.get(kind, 0), 0)
    entries = sizes.get(_DICTIONARY, 0) if kind == _DICTIONARY_TYPE else 0
    return sizes.get(_UNCOMPRESSED, 0), sizes.get(_COMPRESSED, 0), entries, values, cursor.at - at


@lru_cache(2**12)
def _number(raw: bytes) -> int:
    return Cursor(raw).zigzag()

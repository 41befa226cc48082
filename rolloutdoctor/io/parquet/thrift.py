"""Thrift's compact protocol: a place in its bytes, and one that notes where values stand; see Apache Thrift."""

import re
from collections.abc import Iterator

TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
INTEGERS = (4, 5, 6)
INT32 = 5
"""Types of values."""

DEEPEST = 32
"""Structs and lists in one another that are passed over."""

SHORT = 64
"""Bytes of a text whose length may be another in a gap."""

_NUMBER = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
_TEXT = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(SHORT + 1))
"""What holds a number, or a length and the bytes of a text."""


class Cursor:
    """A place in the bytes of a struct. A byte that is not there raises IndexError, one that cannot be ValueError."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def varint(self) -> int:
        """Read a number of as many bytes as it takes."""
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

    def zigzag(self) -> int:
        """Read a number that may be negative."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def integer(self) -> int:
        """Read a value; numbers that tell what follows are not read by this."""
        return self.zigzag()

    def binary(self) -> bytes | int:
        """Read a value, bytes."""
        return self.content(self.varint())

    def content(self, length: int) -> bytes | int:
        """Read so many bytes of a value."""
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
            number = number + (head >> 4) if head >> 4 else self.zigzag()
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
        if depth > DEEPEST:
            raise ValueError("it is nested too deep")
        if kind in (TRUE, FALSE):
            return
        if kind == BYTE:
            self.content(1)
        elif kind in INTEGERS:
            self.integer()
        elif kind == DOUBLE:
            self.content(8)
        elif kind == BINARY:
            self.content(self.varint())
        elif kind in (LIST, SET):
            inner = self.raw[self.at] & 0x0F
            for _ in self.items(inner):
                self.skip(BYTE if inner in (TRUE, FALSE) else inner, depth + 1)
        elif kind == MAP:
            self._skip_map(depth)
        elif kind == STRUCT:
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
                    self.skip(BYTE if kind in (TRUE, FALSE) else kind, depth + 1)


class Recorder(Cursor):
    """Reads bytes that were read before, and notes the gaps in which a value stands: it returns their numbers.

    Attributes:
        gaps: begin and end of each, and the pattern of what may stand there.
    """

    def __init__(self, raw: bytes, at: int) -> None:
        super().__init__(raw)
        self.at = at
        self.gaps: list[tuple[int, int, bytes]] = []

    def integer(self) -> int:
        """Note a number."""
        start = self.at
        self.varint()
        return self._gap(start, _NUMBER)

    def binary(self) -> int:
        """Note a text with its length."""
        start, length = self.at, self.varint()
        self.at += length
        return self._gap(start, _TEXT if length <= SHORT else re.escape(self.raw[start : self.at]))

    def content(self, length: int) -> int:
        """Note so many bytes."""
        start, self.at = self.at, self.at + length
        return self._gap(start, b".{%d}" % length)

    def _gap(self, start: int, holds: bytes) -> int:
        self.gaps.append((start, self.at, holds))
        return len(self.gaps) - 1

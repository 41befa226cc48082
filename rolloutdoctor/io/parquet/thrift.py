"""Thrift's compact protocol: a place in its bytes; see Apache Thrift."""

from collections.abc import Iterator

TRUE, FALSE, BYTE, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
INTEGERS = (4, 5, 6)
INT32 = 5
"""Types of values."""

DEEPEST = 32
"""Structs and lists in one another that are passed over."""


class Cursor:
    """A place in the bytes of a struct. A byte that is not there raises IndexError, one that cannot be ValueError."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0

    def varint(self) -> int:
        """Read a number of as many bytes as it takes."""
        value = 0
        for shift in range(0, 64, 7):
            byte = self.raw[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise ValueError("a number in it is too long")

    def zigzag(self) -> int:
        """Read a number that may be negative."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def binary(self) -> bytes:
        """Read bytes, their number first."""
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
            self.at += 1
        elif kind in INTEGERS:
            self.varint()
        elif kind == DOUBLE:
            self.at += 8
        elif kind == BINARY:
            self.binary()
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

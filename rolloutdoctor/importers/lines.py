"""JSON Lines, one object at a time and in bounded memory, whatever the file holds."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr

import numpy as np

from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import DataError, InputError

LONGEST_LINE = 32 * 2**20
"""Bytes. A rollout of a million tokens with three log-probs each is about as long."""

DEEPEST = 64
"""Levels of nesting; a log has few."""

_NEWLINE = ord("\n")

# Lists of a hostile pickle may hold each other, and print as more than any memory holds.
_SHORT = Repr()
_SHORT.maxlevel = 2

CHUNK_BYTES = 8 * 2**20
"""What is read at a time."""


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of a file.

    Attributes:
        first: number of the first line, counted from 1.
        raw: the lines with their ends; only the last line of a file may lack its own.
        bytes_read: of the file, up to the end of these lines.
    """

    first: int
    raw: bytes
    bytes_read: int


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        number: counted from 1.
        body: the object; None for a last line that was not written to its end.
        bytes_read: of the file, up to the end of this line.
    """

    number: int
    body: dict[str, object] | None
    bytes_read: int


def objects(source: Source) -> Iterator[Line]:
    """Yield the objects of a file. Empty lines are left out; a torn last line has no body.

    Raises:
        InputError: if the file cannot be read.
        DataError: if another line is not a JSON object, or is too long or too deep; the message names the line.
    """
    for chunk in chunks(source):
        yield from objects_of(chunk, source.name)


def chunks(source: Source) -> Iterator[Chunk]:
    """Yield the lines of a file, many at a time; a last line without an end comes alone.

    Raises:
        InputError: if the file cannot be read.
        DataError: if a line is too long.
    """
    first, read, rest = 1, 0, b""
    try:
        with Path(source.path).open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                cut = block.rfind(b"\n") + 1
                if cut:
                    whole, rest = b"".join((rest, memoryview(block)[:cut])), block[cut:]
                    read += len(whole)
                    yield Chunk(first, whole, read)
                    first += _newlines(whole)
                else:
                    rest += block
                    if len(rest) > LONGEST_LINE:
                        raise _too_long(source.name, first)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    if rest:
        yield Chunk(first, rest, read + len(rest))


def objects_of(chunk: Chunk, name: str) -> Iterator[Line]:
    """Yield the objects of some lines of a file called `name`, as `objects` does."""
    read = chunk.bytes_read - len(chunk.raw)
    for number, raw in enumerate(io.BytesIO(chunk.raw), start=chunk.first):
        read += len(raw)
        if len(raw) > LONGEST_LINE:
            raise _too_long(name, number)
        if number == 1:
            # A byte order mark is what some editors put before the first line.
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if not raw.strip():
            continue
        body = parse(raw)
        if body is None and not raw.endswith(b"\n"):
            yield Line(number, None, read)
        elif body is None:
            raise DataError(f"{name}, line {number}: not a JSON object; write one object on each line")
        else:
            yield Line(number, body, read)


def _newlines(raw: bytes) -> int:
    at = np.frombuffer(raw, np.uint8)
    # Blocks that stay in a core's cache, and other threads can run meanwhile.
    return sum(int(np.count_nonzero(at[start : start + 2**17] == _NEWLINE)) for start in range(0, len(at), 2**17))


def _too_long(name: str, number: int) -> DataError:
    limit = LONGEST_LINE // 2**20
    return DataError(f"{name}, line {number}: longer than {limit} MiB; write one rollout per line, or as Parquet")


def parse(raw: bytes) -> dict[str, object] | None:
    """Return the object in some bytes; None if they are anything else, or nested too deep to be a log."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    # Few brackets cannot nest deep, and most lines have few: their lists need not be walked.
    deep = raw.count(b"[") + raw.count(b"{") > DEEPEST and _too_deep(body)
    return body if isinstance(body, dict) and not deep else None


def first_object(path: Path) -> dict[str, object] | None:
    """Return the object on the first line that has one, for sniffing; None if there is none or it is not JSON."""
    try:
        with path.open("rb") as file:
            raw = file.readline(LONGEST_LINE + 1)
            while raw and not raw.strip():
                raw = file.readline(LONGEST_LINE + 1)
    except OSError:
        return None
    if len(raw) > LONGEST_LINE or not raw.lstrip().removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return None
    return parse(raw.removeprefix(b"\xef\xbb\xbf"))


def _too_deep(body: object) -> bool:
    """Tell nesting that later steps, which walk what they get, should not meet."""
    level = [body]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def natural(row: dict[str, object], name: str, where: str) -> int:
    """Return a field that counts something: an integer of 0 or more.

    Raises:
        DataError: if it is absent, or anything else.
    """
    value = row.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise DataError(f"{where}: {name} is {shown(value)} where an integer of 0 or more was expected")
    return value


def number(value: object, what: str) -> float | None:
    """Return a number, or None where there is none.

    Raises:
        DataError: if it is neither; `what` names the field in the message.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, (bool, int, float)):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        raise DataError(f"{what} is {shown(value)} where a number was expected") from None


def shown(value: object) -> str:
    """What a value looks like, short and on one line, for messages.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    """
    words = repr(value[:80]) if isinstance(value, str) else _SHORT.repr(value)
    return " ".join(words[:40].split())

"""JSON Lines, one object at a time and in bounded memory, whatever the file holds."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.errors import DataError, InputError
from rolloutdoctor.io.paths import Source, reason

LONGEST_LINE = 32 * 2**20
"""Bytes. A rollout of a million tokens with three log-probs each is about as long."""

_DEEPEST = 64


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
    read = 0
    try:
        with Path(source.path).open("rb") as file:
            number = 0
            while raw := file.readline(LONGEST_LINE + 1):
                number += 1
                read += len(raw)
                where = f"{source.name}, line {number}"
                if len(raw) > LONGEST_LINE:
                    raise DataError(
                        f"{where}: longer than {LONGEST_LINE // 2**20} MiB; write one rollout per line, or as Parquet"
                    )
                if number == 1:
                    # A byte order mark is what some editors put before the first line.
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if not raw.strip():
                    continue
                body = parse(raw)
                if body is None and not raw.endswith(b"\n"):
                    yield Line(number, None, read)
                elif body is None:
                    raise DataError(f"{where}: not a JSON object; write one object on each line")
                else:
                    yield Line(number, body, read)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None


def parse(raw: bytes) -> dict[str, object] | None:
    """Return the object in some bytes; None if they are anything else, or nested too deep to be a log."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    # Few brackets cannot nest deep, and most lines have few: their lists need not be walked.
    deep = raw.count(b"[") + raw.count(b"{") > _DEEPEST and _too_deep(body)
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
    for _ in range(_DEEPEST):
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
    return " ".join(f"{value!r:.40}".split())

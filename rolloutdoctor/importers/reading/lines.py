"""JSON Lines, one object at a time and in bounded memory, whatever the file holds."""

import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.locations.small_files import once
from rolloutdoctor.results.errors import DataError, InputError

LONGEST_LINE = 32 * 2**20
"""Bytes. A rollout of a million tokens with three log-probs each is about as long."""

DEEPEST = 64
"""Levels of nesting; a log has few."""

_MOST_BRACKETS, _BYTES_A_BRACKET = 2**20, 8
"""Lists and objects that any document may hold, and the bytes for each beyond that: a pair for a token has ten."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_NUMBERS = bytes.maketrans(b"123456789\t\r\n[,:-", b"000000000       ")
_LONG_INTEGER = b" " + b"0" * 19
"""Beginning of the shortest integer beyond 64 bits, of either sign, once `_NUMBERS` has mapped digits, and what comes
before a number, to one character each. Digits behind a decimal point are often more, and harmless."""

_KEY = re.compile(rb'"\s*:')
"""Text that follows every key, and may be in a text; fewer keys than that may be one that is there twice."""

CHUNK_BYTES = 8 * 2**20
"""Bytes that are read at a time."""

_is_growing = ContextVar("is_growing", default=False)


@contextmanager
def growing() -> Iterator[None]:
    """Inside, files are still being written: a last line without its end is not there yet."""
    token = _is_growing.set(True)
    try:
        yield
    finally:
        _is_growing.reset(token)


def is_growing() -> bool:
    """Tell whether files are still being written."""
    return _is_growing.get()


@dataclass(frozen=True)
class Chunk:
    """Some whole lines of a file.

    Attributes:
        file: that they are in.
        first: number of the first line, counted from 1.
        raw: the lines with their ends; only the last line of a file may lack its own.
        bytes_read: of all files, up to the end of these lines.
    """

    file: Source
    first: int
    raw: bytes
    bytes_read: int


@dataclass(frozen=True)
class Line:
    """One line of a file.

    Attributes:
        where: file and line, for messages.
        number: counted from 1.
        body: the object; None for a last line that was not written to its end.
    """

    where: str
    number: int
    body: dict[str, object] | None


def objects(source: Source) -> Iterator[Line]:
    """Yield the objects of a file. Empty lines are left out; a torn last line has no body.

    Raises:
        InputError: if the file cannot be read.
        DataError: if another line is not a JSON object, or is too long or too deep; the message names the line.
    """
    for chunk in chunks([source]):
        yield from objects_of(chunk)


def chunks(files: Iterable[Source]) -> Iterator[Chunk]:
    """Yield the lines of some files, many at a time; a last line without an end comes alone.

    Raises:
        InputError: if a file cannot be read.
        DataError: if a line is too long.
    """
    read = 0
    for file in files:
        first, rest = 1, b""
        try:
            with Path(file.path).open("rb") as stream:
                while block := stream.read(CHUNK_BYTES):
                    cut = block.rfind(b"\n") + 1
                    if cut:
                        complete, rest = b"".join((rest, memoryview(block)[:cut])), block[cut:]
                        read += len(complete)
                        yield Chunk(file, first, complete, read)
                        first += complete.count(b"\n")
                    else:
                        rest += block
                        if len(rest) > LONGEST_LINE:
                            raise _too_long(file, first)
        except OSError as error:
            raise InputError(f"{file.name}: {reason(error)}") from None
        if rest and not is_growing():
            read += len(rest)
            yield Chunk(file, first, rest, read)


def objects_of(chunk: Chunk) -> Iterator[Line]:
    """Yield the objects of some lines, as `objects` does."""
    for number, raw in enumerate(io.BytesIO(chunk.raw), start=chunk.first):
        if len(raw) > LONGEST_LINE:
            raise _too_long(chunk.file, number)
        if number == 1:
            # A byte order mark is what some editors put before the first line.
            raw = raw.removeprefix(_BYTE_ORDER_MARK)
        if not raw.strip():
            continue
        where, body = f"{chunk.file.name}, line {number}", parse(raw)
        if body is None and raw.endswith(b"\n"):
            raise DataError(f"{where}: not a JSON object, or one with a key twice; write one object on each line")
        yield Line(where, number, body)


def _too_long(file: Source, number: int) -> DataError:
    limit = LONGEST_LINE // 2**20
    return DataError(f"{file.name}, line {number}: longer than {limit} MiB; write one rollout per line, or as Parquet")


def parse(raw: bytes) -> dict[str, object] | None:
    """Return the object in some bytes; None if they are anything else, or nested too deep to be a log."""
    try:
        body = None if _is_all_brackets(raw) else _loaded(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and not _too_deep(body, raw) else None


def without_repeats(raw: bytes) -> tuple[dict[str, object] | None, tuple[str, ...]]:
    """Return the object in some bytes as `parse` does, without keys that are there twice with two values, and these."""
    parsed = parse(raw)
    if parsed is not None:
        return parsed, ()
    body, repeated = _told_apart(raw)
    return (body, repeated) if isinstance(body, dict) else (None, ())


def document(raw: bytes) -> object:
    """Return the JSON document in some bytes; None if it is none, or nested too deep to be a log."""
    raw = raw.removeprefix(_BYTE_ORDER_MARK)
    try:
        body = None if _is_all_brackets(raw) else _loaded(raw)
    except (ValueError, RecursionError):
        return None
    return None if _too_deep({"": body}, raw) else body


def document_without_repeats(raw: bytes) -> tuple[object, tuple[str, ...]]:
    """Return the document in some bytes, without keys that an object has twice with two values, and these."""
    body = document(raw)
    return _told_apart(raw.removeprefix(_BYTE_ORDER_MARK)) if body is None else (body, ())


def _told_apart(raw: bytes) -> tuple[object, tuple[str, ...]]:
    """Return what is in some bytes, without keys that an object has twice with two values, and these."""
    repeated: dict[str, None] = {}

    def told_apart(pairs: list[tuple[str, object]]) -> dict[str, object]:
        first: dict[str, object] = {}
        odd = [name for name, value in pairs if first.setdefault(name, value) != value]
        repeated.update(dict.fromkeys(odd))
        return {name: value for name, value in first.items() if name not in odd}

    try:
        body = None if _is_all_brackets(raw) else json.loads(raw, object_pairs_hook=told_apart)
    except (ValueError, RecursionError):
        return None, ()
    return (None, ()) if _too_deep({"": body}, raw) else (body, tuple(repeated))


def _loaded(raw: bytes) -> object:
    """Return what `json.loads` returns, several times as fast where `orjson` reads the same."""
    import orjson  # when a file is read, so that the command line starts without it

    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # What it would read otherwise, such as NaN, 1e400 and half of a surrogate pair, it refuses.
        return json.loads(raw, object_pairs_hook=once)
    is_lossy = _may_lose_digits(body, raw) or len(_KEY.findall(raw)) != _keys(body)
    return json.loads(raw, object_pairs_hook=once) if is_lossy else body


def _is_all_brackets(raw: bytes) -> bool:
    """Tell lists and objects that hold next to nothing: each takes 60 bytes and more, of three in the file."""
    if len(raw) < 2 * _MOST_BRACKETS:
        return False
    return raw.count(b"[") + raw.count(b"{") > max(_MOST_BRACKETS, len(raw) // _BYTES_A_BRACKET)


def _keys(body: object) -> int:
    """Count the keys of a document; too few, where a list holds objects behind something else."""
    count, waiting = 0, [body]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            count += len(inner)
            waiting += [each for each in inner.values() if isinstance(each, (dict, list))]
        elif isinstance(inner, list) and inner and isinstance(inner[0], (dict, list)):
            waiting += inner
    return count


def _may_lose_digits(body: object, raw: bytes) -> bool:
    """Tell whether `orjson` may have made a float of an integer beyond 64 bits, which Python keeps."""
    if isinstance(body, dict) and not any(isinstance(value, (dict, list)) for value in body.values()):
        return any(isinstance(value, float) and abs(value) >= 2**63 for value in body.values())
    return _LONG_INTEGER in raw.translate(_NUMBERS)


def first_object(path: Path) -> dict[str, object] | None:
    """Return the object on the first line that has one, for sniffing; None if there is none or it is not JSON."""
    return next(iter(first_objects(path, 1)), None)


def first_objects(path: Path, most: int, *, repeats: bool = False) -> list[dict[str, object]]:
    """Return the objects on the first lines that are not empty, for sniffing; none from the first that is not one.

    Args:
        path: of a file.
        most: objects.
        repeats: True to take objects with a key twice, as `without_repeats` does.
    """
    read = (lambda text: without_repeats(text)[0]) if repeats else parse
    rows: list[dict[str, object]] = []
    # To open a pipe is to wait for who writes to it.
    if not path.is_file():
        return rows
    try:
        with path.open("rb") as file:
            while len(rows) < most and (raw := file.readline(LONGEST_LINE + 1)):
                if not raw.strip():
                    continue
                text = raw.lstrip().removeprefix(_BYTE_ORDER_MARK)
                row = read(text) if len(raw) <= LONGEST_LINE and text.lstrip().startswith(b"{") else None
                if row is None:
                    break
                rows.append(row)
    except OSError:
        return rows
    return rows


def _too_deep(body: dict[str, object], raw: bytes) -> bool:
    """Tell nesting that later steps, which walk what they get, should not meet."""
    level: list[object] = [body]
    for depth in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, (dict, list))
        ]
        # Few brackets cannot nest deep, and most lines have few: their lists need not be walked.
        if not level or (depth == 0 and raw.count(b"[") + raw.count(b"{") <= DEEPEST):
            return False
    return True

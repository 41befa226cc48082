"""Lines of text as terminals show them, of files that may hold anything."""

import codecs
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.results.errors import InputError

SNIFFED = 2**20
"""Bytes that are looked through for numbers: what is printed before training is seldom more."""

_FURTHEST = 2**25
"""Bytes behind them that are looked through where progress bars fill them."""

TRACEBACK = "Traceback (most recent call last)"
"""How Python begins to print an error."""

_LAST = 2**16
"""Bytes of its ending: a traceback, and what launchers say of it."""

_LONGEST = 2**20
"""Bytes of a line; what is longer holds a text, or was never a line."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How text begins that PowerShell wrote; every other byte of most of it is 0."""

_SHORT = 64

_IN_ENVELOPE = ("log", "message", "msg", "line", "textPayload")
"""Names under which Docker and collectors of logs put a printed line into an object of JSON."""

_BINARY = 0.02
"""Share of NUL bytes above which a file is no text; NCCL prints one now and then."""

_HOLE = re.compile(rb"\0{1024,}")
"""NUL bytes where nothing was written: a program goes on at its place in a file that was emptied below it."""


def beginning(path: Path) -> list[str]:
    """Return the first lines of a text file; none of one that is no text.

    Where progress bars fill most of them, lines behind these follow, without what was drawn over.
    """
    if not path.is_file():
        return []
    try:
        with _opened(path) as file:
            start = file.read(SNIFFED)
            if len(start) == SNIFFED and 2 * len(_shown(start)) < SNIFFED:
                start += _shown(file.read(_FURTHEST))[:SNIFFED]
    except OSError:
        return []
    return list(lines_in(start)) if is_text(start) else []


def ending(path: Path) -> list[str]:
    """Return the last lines of a text file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST))
        return list(lines_in(file.read()))


def _shown(text: bytes) -> bytes:
    """Return what a terminal shows of a text: of each line what was drawn last."""
    return b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in _HOLE.sub(b"\n", text).split(b"\n"))


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file of text, as UTF-8 where it is UTF-16."""
    with path.open("rb") as file:
        start = file.read(_SHORT)
        is_wide = start[:2] in _UTF_16 and start.count(b"\0") >= len(start) // 4
        file.seek(0)
        yield codecs.EncodedFile(file, "utf-8", "utf-16", "replace") if is_wide else file


def is_text(start: bytes) -> bool:
    """Tell text by its first bytes, but for those where nothing was written."""
    start = _HOLE.sub(b"\n", start)
    return start.count(b"\0") <= _BINARY * len(start) and not start.startswith((b"PAR1", b"SQLite format 3"))


def printed_in(raw: bytes) -> str | None:
    """Return the line of text in an object of JSON that holds nothing else but when, where and how it was printed.

    >>> printed_in(b'{"log": "step 1 | loss 0.5", "stream": "stdout"}'), printed_in(b'{"log": "", "step": 1}')
    ('step 1 | loss 0.5', None)
    """
    row = lines.parse(raw) if any(b'"%s"' % name.encode() in raw for name in _IN_ENVELOPE) else None
    if row is None or any(is_metric(name) or "step" in name for name in row):
        return None
    name = next((name for name in _IN_ENVELOPE if isinstance(row.get(name), str)), None)
    return None if name is None else str(row[name]).strip("\n")


def lines_in(raw: bytes) -> Iterator[str]:
    """Yield the lines of some bytes; what a progress bar drew over counts as lines, too."""
    yield from (
        _plain(line) for line in _HOLE.sub(b"\n", raw).replace(b"\r", b"\n").split(b"\n") if len(line) <= _LONGEST
    )


def lines_of(source: Source, tell: Callable[[str], None] = lambda sentence: None) -> Iterator[str]:
    """Yield all lines of a file, but for those that are too long; `tell` takes a sentence on what is not written.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        with _opened(Path(source.path)) as file:
            rest, skipped = b"", 0
            while block := file.read(lines.CHUNK_BYTES):
                skipped += (holes := sum(map(len, _HOLE.findall(block))))
                block = _HOLE.sub(b"\n", block) if holes else block
                *complete, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
                yield from (_plain(line) for line in complete if len(line) <= _LONGEST)
                rest = rest if len(rest) <= _LONGEST else b""
            if not lines.is_growing():
                yield _plain(rest)
            if skipped:
                tell(f"{source.name}: {skipped:,} NUL bytes in a row, where nothing was written, are skipped")
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None


def _plain(raw: bytes) -> str:
    if raw.startswith(b"{") and (inner := printed_in(raw)) is not None:
        raw = inner.encode("utf-8", "replace")
    # A byte that is no text, or the mark that some editors begin a file with, is no part of a name.
    return _COLOURS.sub("", raw.replace(b"\0", b"").decode("utf-8", "ignore").replace("\ufeff", ""))

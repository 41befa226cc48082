"""Lines of text as terminals show them, of files that may hold anything."""

import re
from collections.abc import Iterator
from pathlib import Path

from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

SNIFFED = 2**20
"""Bytes that are looked through for numbers: what is printed before training is seldom more."""

_LONGEST = 2**20
"""Bytes of a line; what is longer holds a text, or was never a line."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_BINARY = 0.02
"""Share of NUL bytes above which a file is no text; NCCL prints one now and then."""


def beginning(path: Path) -> list[str]:
    """Return the first lines of a text file; none of one that is no text."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            start = file.read(SNIFFED)
    except OSError:
        return []
    return list(lines_in(start)) if is_text(start) else []


def is_text(start: bytes) -> bool:
    """Tell text by its first bytes."""
    return start.count(b"\0") <= _BINARY * len(start) and not start.startswith((b"PAR1", b"SQLite format 3"))


def lines_in(raw: bytes) -> Iterator[str]:
    """Yield the lines of some bytes; what a progress bar drew over counts as lines, too."""
    yield from (_plain(line) for line in raw.replace(b"\r", b"\n").split(b"\n") if len(line) <= _LONGEST)


def lines_of(source: Source) -> Iterator[str]:
    """Yield all lines of a file, but for those that are too long.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        with Path(source.path).open("rb") as file:
            rest = b""
            while block := file.read(lines.CHUNK_BYTES):
                *whole, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
                yield from (_plain(line) for line in whole if len(line) <= _LONGEST)
                rest = rest if len(rest) <= _LONGEST else b""
            if not lines.is_growing():
                yield _plain(rest)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None


def _plain(raw: bytes) -> str:
    # A byte that is no text, or the mark that some editors begin a file with, is no part of a name.
    return _COLOURS.sub("", raw.replace(b"\0", b"").decode("utf-8", "ignore").replace("\ufeff", ""))

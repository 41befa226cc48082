"""Standard output and standard error, whatever they are: closed, full, or without a reader."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rolloutdoctor.results.errors import UsageError


class _Forgiving(io.FileIO):
    """Takes what it cannot write for written: a message that nobody can read is no reason to fail."""

    def write(self, content: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]  # any buffer
        try:
            return super().write(content) or 0
        except OSError:
            return len(content)


def prepare_streams() -> None:
    """Take the places of streams that were closed, and let no message fail.

    Where one was closed, the next file that is opened would get its number, and what a library prints would go there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # For reading: writing to it fails as writing to what is closed.
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process
    encoding = "utf-8" if sys.stderr is None else sys.stderr.encoding
    raw = io.BufferedWriter(_Forgiving(2, "w", closefd=False))  # type: ignore[type-var]  # it is a raw file
    sys.stderr = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", line_buffering=True)


@contextmanager
def printing() -> Iterator[None]:
    """Turn what cannot be printed into one sentence.

    Raises:
        UsageError: if standard output cannot be written.
        BrokenPipeError: if whoever read it has gone.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        raise UsageError(
            f"standard output cannot be written ({error.strerror}); send it elsewhere, or name a file"
        ) from None


def silence(stream: TextIO) -> None:
    """Let what still waits in a stream go nowhere, and keep the interpreter from complaining of it."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)

"""Output of text: everything that is printed goes through here, escaped."""

import os
import re
import sys
from typing import IO

from rolloutdoctor.cli.streams import printing
from rolloutdoctor.results.escapes import sentence, visible_lines, without_commands

_RAW_BYTES = 0xDC00
_RAW_BYTE = re.compile("[\udc80-\udcff]")
"""How Python writes a byte of a name that is not UTF-8."""


def say(message: str) -> None:
    """Print one sentence to stderr; bytes of a file's name that are not UTF-8 are shown with backslashes."""
    named = _RAW_BYTE.sub(lambda match: f"\\x{ord(match[0]) - _RAW_BYTES:02x}", message)
    write(f"rolloutdoctor: {sentence(named)}\n", sys.stderr)


def show(text: str, *, colored: bool = False) -> None:
    """Print a result to stdout.

    Args:
        text: whole lines.
        colored: True if it has sequences for colours, all of them our own.

    Raises:
        UsageError: if it cannot be written.
        BrokenPipeError: if whoever read it has gone.
    """
    with printing():
        write(visible_lines(text, colored=colored), sys.stdout)
        sys.stdout.flush()


def write(text: str, stream: IO[str]) -> None:
    """Write text that is escaped already; what the stream cannot encode is written as its number."""
    if os.environ.get("GITHUB_ACTIONS"):
        text = without_commands(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

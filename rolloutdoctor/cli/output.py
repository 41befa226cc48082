"""Files that a command writes: whole, or not at all."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutdoctor.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.io.run import Run


def check_target(path: str, run: "Run") -> None:
    """Refuse, before a long run is read, what could not be written at its end.

    Raises:
        UsageError: if the folder does not take a file, or the file is one of the run's own.
    """
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder; name a file to write to")
    if not target.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {target.parent}; make it, or name another file")
    if not os.access(target.parent, os.W_OK):
        raise UsageError(f"{path}: the folder {target.parent} cannot be written to; name another file")
    if run.reads(target):
        raise UsageError(f"{path} is a file of the run itself; name another file to write to")


def write_whole(content: bytes, path: str, name: str = "") -> None:
    """Write a file under a temporary name, then put it in place: nobody ever sees a part of it.

    Args:
        content: of the file.
        path: where to.
        name: what a message calls the file; empty: its path.

    Raises:
        UsageError: if it cannot be written.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:
        raise UsageError(f"{name or path}: {error.strerror}; name a file that can be written") from None
    finally:
        temporary.unlink(missing_ok=True)

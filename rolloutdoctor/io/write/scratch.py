"""Temporary folders, named by the process that made them, so that what a killed one left can be removed."""

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rolloutdoctor.io.write.owners import is_left_behind, tag
from rolloutdoctor.results.errors import InputError

PREFIX, SHORT_PREFIX = "rolloutdoctor-", "rd-"
"""The second where a path is bounded: that of a socket has 107 bytes."""

_open: set[Path] = set()
_lasting: dict[tuple[int, Path], Path] = {}


@contextmanager
def scratch_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Give a new folder that nobody else can read; it is removed with all that is in it, however this ends.

    Raises:
        InputError: if there is no space for temporary files.
    """
    folder = _made(Path(tempfile.gettempdir()), prefix, "a dump is read through")
    try:
        yield folder
    finally:
        _remove(folder)


def lasting_folder(folder: Path | None = None) -> Path:
    """Return a folder that nobody else can read, the same one until this process ends; then it is removed.

    Args:
        folder: the folder that it is in; that for temporary files where it is None, or not on this machine.

    Raises:
        InputError: if there is no space for temporary files.
    """
    parent = folder if folder is not None and folder.is_dir() else Path(tempfile.gettempdir())
    key = os.getpid(), parent
    if key not in _lasting or not _lasting[key].is_dir():
        atexit.register(remove_scratch)
        _lasting[key] = _made(parent, PREFIX, "tables larger than --memory are kept in")
    return _lasting[key]


def _made(parent: Path, prefix: str, need: str) -> Path:
    """Make a folder, and remove those that dead processes have left beside it."""
    sweep_scratch(parent)
    folder = parent / f"{prefix}{tag()}"
    try:
        # Noted before it is there, so that a signal in between leaves nothing.
        _open.add(folder)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise InputError(
            f"{need} a temporary folder, and none can be made ({error.strerror or error}); set TMPDIR to a folder that "
            "can be written to"
        ) from None
    return folder


def sweep_scratch(parent: Path | None = None) -> None:
    """Remove the folders of processes that are known to be dead; those of other users are left alone."""
    with suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            if any(is_left_behind(entry.name, prefix=prefix) for prefix in (PREFIX, SHORT_PREFIX)):
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                        shutil.rmtree(entry.path, ignore_errors=True)


def remove_scratch() -> None:
    """Remove the folders of this process: for who ends it in the middle of anything."""
    for folder in list(_open):
        _remove(folder)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _open.discard(folder)

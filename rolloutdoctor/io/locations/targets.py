"""Targets of results: a file of its own, never a file that is read, and nothing that is no file."""

import errno
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.results.errors import UsageError

_LONGEST_SHOWN = 160
_MOST_LINKS = 40
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a disk",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class OutputError(UsageError):
    """A result cannot be written where it was asked for.

    Attributes:
        why: the reason of the operating system, or nothing.
    """

    def __init__(self, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why


def unwritable(name: str, error: OSError) -> OutputError:
    """Say why a file cannot be written."""
    why = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return OutputError(f"{name}: cannot be written ({why}); free space, or name a file elsewhere", why)
    return OutputError(f"{name}: cannot be written ({why}); name a file that can be written", why)


def shown(path: "str | os.PathLike[str]") -> str:
    """Name a path in a message: bytes that are not UTF-8 are escaped, and of a very long one the ends are shown.

    >>> shown("run.parquet"), len(shown("x" * 5000))
    ('run.parquet', 160)
    """
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    return name if len(name) <= _LONGEST_SHOWN else f"{name[:60]}...{name[63 - _LONGEST_SHOWN :]}"


@dataclass(frozen=True)
class Target:
    """A place that takes a result.

    Attributes:
        name: how messages call it.
        path: the file, behind every link.
        found: what is there now, or None.
        descriptor: number of the open file of this process that the path means, as ``/dev/stdout`` does, or None.
    """

    name: str
    path: Path
    found: os.stat_result | None = None
    descriptor: int | None = None

    @property
    def streams(self) -> bool:
        """True for what is written into, rather than replaced."""
        return self.descriptor is not None or (self.found is not None and not stat.S_ISREG(self.found.st_mode))

    @classmethod
    def of(cls, location: "str | os.PathLike[str]", name: str = "") -> "Target":
        """Follow links, and refuse what no result can be written to.

        Args:
            location: the path as the user gave it.
            name: how messages call it; empty: by its path.

        Raises:
            OutputError: if it is a folder, lies in none, or cannot be written to.
        """
        text = os.fsdecode(location)
        name = name or shown(text)
        if not text:
            raise OutputError("'' names no file to write to; name one")
        if "\0" in text:
            raise OutputError(f"{text[:_LONGEST_SHOWN]!r}: not a path; it holds a null character")
        try:
            descriptor = _descriptor(text)
            if descriptor is not None:
                return cls(name, Path(text), os.fstat(descriptor), descriptor)
            path = Path(os.path.realpath(text))
            status = _found(text)
        except OSError as error:
            raise unwritable(name, error) from None
        kind = None if status is None else stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR or text.endswith("/"):
            raise OutputError(f"{name} is a folder; name a file to write to")
        if kind in (stat.S_IFBLK, stat.S_IFSOCK):
            raise OutputError(f"{name} is {_KINDS[kind]}; name a file to write to")
        if kind is not None and not os.access(path, os.W_OK):
            raise OutputError(f"{name}: the file is there and cannot be written to; name another file")
        if kind in (None, stat.S_IFREG):
            _check_folder(Path(text).parent if path == Path(os.path.abspath(text)) else path.parent, name)  # noqa: PTH100 - as given
        return cls(name, path, status)

    def check_whole(self, subject: str) -> None:
        """Insist on a file, for what cannot be written piece after piece.

        Raises:
            OutputError: if this is a device, a pipe or an open file.
        """
        if self.streams:
            kind = None if self.found is None else _KINDS.get(stat.S_IFMT(self.found.st_mode))
            raise OutputError(f"{self.name} is {kind or 'an open file'}, and {subject} has to be a file; name one")

    def is_any(self, paths: "Iterable[str | os.PathLike[str]]") -> bool:
        """Tell whether this is one of these files, or lies in one of these folders, under any name of it."""
        if self.found is None or (self.streams and not stat.S_ISREG(self.found.st_mode)):
            return False
        return any(_holds(os.fsdecode(path), self.path, self.found) for path in paths)

    def refuse(self, inputs: "Iterable[str | os.PathLike[str]]", problem: str = "is a file that is read") -> None:
        """Refuse to write over a file that is read.

        Raises:
            OutputError: if this is one of them.
        """
        if self.is_any(inputs):
            raise OutputError(f"{self.name} {problem}; name another file to write to")


def _holds(place: str, path: Path, target: os.stat_result) -> bool:
    if _ADDRESS.match(place):
        return False
    try:
        status = os.stat(place)  # noqa: PTH116 - keeps the name as given
    except (OSError, ValueError):
        return False
    if not stat.S_ISDIR(status.st_mode):
        return os.path.samestat(status, target)
    if Path(os.path.realpath(place)) in path.parents:
        return True
    # Under another name: a hard link, or a file system that is mounted twice.
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                if os.path.samestat(os.stat(os.path.join(folder, name)), target):  # noqa: PTH116, PTH118 - one string less for each
                    return True
            except OSError:
                continue
    return False


def _found(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - keeps the name as given
    except (FileNotFoundError, NotADirectoryError):
        return None


def _descriptor(path: str) -> int | None:
    """The open file that a path such as ``/dev/stdout`` or ``/dev/fd/3`` means."""
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(path)
        if name.isascii() and name.isdigit():
            at = "/dev/fd" if folder == "/dev/fd" else os.path.realpath(folder)
            if at in ("/dev/fd", f"/proc/{os.getpid()}/fd"):
                return int(name)
        if not os.path.islink(path):  # noqa: PTH114 - keeps the name as given
            return None
        path = os.path.join(folder, os.readlink(path))  # noqa: PTH115, PTH118 - keeps the name as given
    return None


def _check_folder(folder: Path, name: str) -> None:
    shown_folder = shown(folder)
    if not folder.is_dir():
        raise OutputError(f"{name}: there is no folder {shown_folder}; make it, or name another file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{name}: the folder {shown_folder} cannot be written to; name another file")
    if _is_full(folder):
        # Before a long run is read, and not at its end.
        raise unwritable(name, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _is_full(folder: Path) -> bool:
    """Tell a file system without one free block."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    free = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    return disk.f_blocks > 0 and free == 0

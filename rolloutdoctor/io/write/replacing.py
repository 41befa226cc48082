"""Files that appear whole or not at all, and leave nothing behind.

What is written goes to a temporary name in the same folder, and takes the place of the old file only when it is whole.
The temporary name says whose it is: what a killed process left is removed by the next one that writes there.
"""

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from rolloutdoctor.io.locations.targets import OutputError, Target, unwritable
from rolloutdoctor.io.uninterrupted import uninterrupted
from rolloutdoctor.io.write.owners import is_left_behind, tag

SUFFIX = ".part"
_LONGEST_STEM = 120
"""Of a temporary name: most file systems take 255 bytes, and the rest of it needs 60."""

_unfinished: set[Path] = set()
_swept: set[Path] = set()
_placed: dict[str, tuple[Target, tuple[tuple[int, int] | None, ...]]] = {}
"""Name to the target, and to which files may have it: the last one that this process put there, and the next one."""


class TakenError(OutputError):
    """A name that was free when the writing began is free no more."""


class Replacement:
    """A file under a temporary name.

    Args:
        target: the file that it will be.
        what: it is, in words; refused where the target is no file.
        fresh: True to replace nothing: a file that appears there meanwhile stays.

    Attributes:
        target: the file that it will be.
        file: to write to.

    Raises:
        OutputError: if nothing can be written there.
    """

    def __init__(self, target: Target, subject: str, *, fresh: bool = False) -> None:
        target.check_whole(subject)
        self.target, self._fresh = target, fresh
        folder, name = target.path.parent, target.path.name
        sweep(folder)
        stem = os.fsdecode(os.fsencode(name)[:_LONGEST_STEM])
        # Not named as the file will be: whoever lists a folder of runs must not pick up an unfinished one.
        self._temporary = folder / f".{stem}.{tag()}{SUFFIX}"
        mode = 0o666 if target.found is None else stat.S_IMODE(target.found.st_mode) & 0o777
        # Noted before it is there, so that a signal in between leaves nothing.
        _unfinished.add(self._temporary)
        try:
            number = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), mode)
            self.file: BinaryIO = os.fdopen(number, "wb")
        except OSError as error:
            self.discard()
            raise OutputError(
                f"{target.name}: cannot write there ({error.strerror}); name a writable folder", error.strerror or ""
            ) from None

    def complete(self) -> None:
        """Bring everything to the disk, under the temporary name still; nothing is left of it if that fails.

        Raises:
            OutputError: if it does not fit, or cannot be written for another reason.
        """
        with self.explaining_errors():
            self.file.flush()
            number = self.file.fileno()
            old = self.target.found
            if old is not None:
                _permit(number, old)
            try:
                os.fsync(number)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
            self.file.close()

    def place(self) -> None:
        """Give the complete file its name.

        Raises:
            TakenError: if it was to be fresh and another file has the name.
            OutputError: if it cannot be put there.
        """
        with self.explaining_errors():
            # Noted before: a signal may come between the rename and whatever follows it.
            before = _placed.get(self.target.name, (self.target, ()))[1][-1:]
            _placed[self.target.name] = self.target, (*before, _identity(self._temporary))
            if self._fresh:
                _link(self._temporary, self.target)
            else:
                self._temporary.replace(self.target.path)
        self.discard()

    def check_free(self) -> None:
        """Insist that no file has the name.

        Raises:
            TakenError: if one has it.
        """
        if os.path.lexists(self.target.path):
            raise _taken(self.target)

    def discard(self) -> None:
        """Remove what was written, whatever happened to it; does nothing to a file that has its name."""
        if hasattr(self, "file"):
            with contextlib.suppress(OSError, ValueError):
                self.file.close()
        _remove(self._temporary)

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Turn a failure to write into one sentence; whatever it is, nothing is left behind."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise unwritable(self.target.name, error) from None
        except BaseException:
            self.discard()
            raise


def write_whole(content: bytes | Iterable[bytes], target: Target, subject: str = "this") -> None:
    """Write a file so that nobody ever sees a part of it; a device, a pipe or an open file is written into.

    Args:
        content: of the file, at once or in pieces.
        target: the file.
        subject: it is, in words; refused where the target is no file.

    Raises:
        OutputError: if it cannot be written.
        BrokenPipeError: if it is a pipe whose reader has gone.
    """
    pieces = (content,) if isinstance(content, bytes) else content
    if target.streams:
        _write_into(pieces, target)
        return
    replacement = Replacement(target, subject)
    with replacement.explaining_errors():
        for piece in pieces:
            replacement.file.write(piece)
    replacement.complete()
    replacement.place()


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, a mebibyte at a time."""
    with path.open("rb") as file:
        while piece := file.read(2**20):
            yield piece


def write_together(contents: Mapping[Target, bytes | Iterable[bytes]], seal: Target) -> None:
    """Write files that are one result: all are complete before the first gets its name.

    Args:
        contents: target to content, at once or in pieces, in the order in which they get their names.
        seal: the last of them, which says that the others are whole; an old one goes before the first has its name.

    Raises:
        OutputError: if one cannot be written; then the old ones are as they were.
    """
    begun: list[Replacement] = []

    def place() -> None:
        seal.path.unlink(missing_ok=True)
        for replacement in begun:
            replacement.place()

    try:
        for target, content in contents.items():
            replacement = Replacement(target, "a file of a result")
            begun.append(replacement)
            with replacement.explaining_errors():
                replacement.file.writelines((content,) if isinstance(content, bytes) else content)
            replacement.complete()
        uninterrupted(place)
    finally:
        for replacement in begun:
            replacement.discard()


def sweep(folder: Path) -> None:
    """Remove what processes that are known to be dead have left in a folder; once for each folder."""
    if folder in _swept:
        return
    _swept.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        left = [Path(entry.path) for entry in entries if is_left_behind(entry.name, prefix=".", suffix=SUFFIX)]
        for path in left:
            path.unlink(missing_ok=True)


def remove_unfinished() -> None:
    """Remove what this process has not finished: for who ends it in the middle of anything."""
    for path in list(_unfinished):
        _remove(path)


def placed() -> tuple[str, ...]:
    """Names of the files that this process has completed and that are there; a temporary run file is gone by then."""
    return tuple(
        target.name for target, files in _placed.values() if (there := _identity(target.path)) and there in files
    )


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a file, which it keeps under another name; None: there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove(path: Path) -> None:
    if path in _unfinished:
        with contextlib.suppress(OSError):
            path.unlink()
        _unfinished.discard(path)


def _taken(target: Target) -> TakenError:
    return TakenError(f"{target.name}: another file has got this name meanwhile; name another one")


def _permit(number: int, old: os.stat_result) -> None:
    """Let the same people read and write a file as the one that it replaces, and nobody else."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    # Only root may give a file away.
    for owner in (old.st_uid, -1):
        with contextlib.suppress(OSError):
            os.fchown(number, owner, old.st_gid)
            break
    if os.fstat(number).st_gid != old.st_gid:
        mode &= 0o707
    with contextlib.suppress(OSError):
        os.fchmod(number, mode)


def _link(temporary: Path, target: Target) -> None:
    """Give a file a name that no other has; what is there is never replaced, whoever put it there."""
    try:
        os.link(temporary, target.path)
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        # A file system without links: this is as close to it as it allows.
        if os.path.lexists(target.path):
            raise _taken(target) from None
        temporary.rename(target.path)


def _write_into(pieces: Iterable[bytes], target: Target) -> None:
    try:
        if target.descriptor is not None:
            # As if it had been printed: what was printed before stays before it.
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            number = os.dup(target.descriptor)
        else:
            number = os.open(target.path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        with os.fdopen(number, "wb", buffering=0) as file:
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise unwritable(target.name, error) from None

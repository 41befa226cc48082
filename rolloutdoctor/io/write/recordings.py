"""Names of recordings: each has its own, whoever else records there, and no recording replaces another.

The journal of a recording that goes on is locked by the process that writes it; the lock goes when the process does,
however. File systems that know no locks are why the run file, too, is put in place only where no other is.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rolloutdoctor.io.locations.paths import JOURNAL_SUFFIX
from rolloutdoctor.io.locations.targets import Target, unwritable
from rolloutdoctor.io.write.owners import tag
from rolloutdoctor.io.write.replacing import SUFFIX as UNFINISHED
from rolloutdoctor.io.write.replacing import sweep
from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.results.errors import UsageError

SUFFIX = JOURNAL_SUFFIX

_RUN_NAME = re.compile(r"(?P<stem>.*?)(?P<rank>\.rank[0-9]+)?(?P<suffix>\.parquet)?", re.DOTALL)


class Begun(NamedTuple):
    """A recording that has a name.

    Attributes:
        file: its journal, locked; unbuffered, so that what was appended is the operating system's.
        journal: path of the journal.
        run: path that the run file will have.
    """

    file: BinaryIO
    journal: Path
    run: Path


def begin(run_path: Path, header: bytes) -> Begun:
    """Open a journal for a run file that is not there, and that nobody else is recording.

    Args:
        run_path: the run file. Where it is there, or its metrics table, or somebody records it, the recording gets the
            next free name: ``run.2.parquet``.
        header: what the journal begins with; it never appears without.

    Raises:
        UsageError: if nothing can be written there.
    """
    if run_path.exists() and not run_path.is_file():
        Target.of(run_path).check_whole("a recording")
    sweep(run_path.parent)
    for candidate in free_names(run_path):
        begun = _create(candidate, header)
        if begun is not None:
            return begun
    raise AssertionError("names never end")


def free_names(run_path: Path) -> Iterator[Path]:
    """Yield the names, this one first, that no run file has and nobody records to."""
    number = 1
    while True:
        candidate = _numbered(run_path, number)
        if not (candidate.exists() or metrics_path(candidate).exists() or any(map(is_live, _journals(candidate)))):
            yield candidate
        number += 1


def is_live(journal: Path) -> bool:
    """Tell whether somebody still writes to a journal."""
    for mode in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(OSError):
            number = os.open(journal, mode | os.O_CLOEXEC)
            try:
                return not _lock(number)
            finally:
                # Which lets go of the lock.
                os.close(number)
    return False


def release(file: BinaryIO) -> None:
    """Close a journal; forked processes that hold it open no longer keep its name."""
    if not file.closed:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def _numbered(run_path: Path, number: int) -> Path:
    """The name of a further recording; all ranks of it are found by one pattern.

    >>> _numbered(Path("run.rank0.parquet"), 2).name
    'run.2.rank0.parquet'
    """
    match = _RUN_NAME.fullmatch(run_path.name)
    if number == 1 or match is None:
        return run_path
    return run_path.with_name(f"{match['stem']}.{number}{match['rank'] or ''}{match['suffix'] or ''}")


def _journal(run_path: Path, number: int) -> Path:
    return run_path.with_name(f"{run_path.name}{'' if number == 1 else f'.{number}'}{SUFFIX}")


def _journals(run_path: Path) -> list[Path]:
    pattern = re.compile(rf"{re.escape(run_path.name)}(\.[0-9]+)?{re.escape(SUFFIX)}")
    with contextlib.suppress(OSError), os.scandir(run_path.parent) as entries:
        return [Path(entry.path) for entry in entries if pattern.fullmatch(entry.name)]
    return []


def _create(run_path: Path, header: bytes) -> Begun | None:
    """Open a journal that was not there; None if the one that is there is still written to."""
    temporary = run_path.with_name(f".{run_path.name}{SUFFIX}.{tag()}{UNFINISHED}")
    try:
        file = _opened(temporary, header)
    except OSError as error:
        raise UsageError(f"{run_path}: cannot write there ({error.strerror}); name a writable folder") from error
    try:
        number = 1
        while True:
            path = _journal(run_path, number)
            try:
                # Locked before it has its name: who finds it there knows at once whether it is in use.
                os.link(temporary, path)
                return Begun(file, path, run_path)
            except FileExistsError:
                if is_live(path):
                    file.close()
                    return None
                number += 1
    except OSError:
        file.close()
        return _without_links(run_path, header)
    finally:
        temporary.unlink(missing_ok=True)


def _without_links(run_path: Path, header: bytes) -> Begun | None:
    """Claim the name on a file system without hard links."""
    number = 1
    while True:
        path = _journal(run_path, number)
        try:
            return Begun(_opened(path, header), path, run_path)
        except FileExistsError:
            if is_live(path):
                return None
            number += 1
        except OSError as error:
            raise unwritable(str(run_path), error) from error


def _opened(path: Path, header: bytes) -> BinaryIO:
    file = path.open("xb", buffering=0)
    try:
        _lock(file.fileno())
        append(file, header, 0)
    except BaseException:
        file.close()
        path.unlink(missing_ok=True)
        raise
    return file


def append(file: BinaryIO, content: bytes, size: int) -> None:
    """Append all of `content` to a file of `size` bytes, or nothing: a full disk takes a part at first.

    Raises:
        OSError: if it does not fit.
    """
    view = memoryview(content)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), size)
            os.lseek(file.fileno(), size, os.SEEK_SET)
        raise


def _lock(number: int) -> bool:
    """True unless somebody else has locked the file, or it cannot be known."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True

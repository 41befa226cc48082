"""What was found in a file, kept for as long as the file does not change."""

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from pathlib import Path
from time import time_ns
from typing import TypeVar, cast

_Find = TypeVar("_Find", bound=Callable[..., object])

_JUST_NOW = 20_000_000
"""Nanoseconds after which a file that is written again has another time: clocks of files tick every 10 ms or sooner."""


def state_of(path: Path) -> tuple[object, ...]:
    """Return number, size and time of a file, of what SQLite keeps beside it, and of its folder.

    That of a file that was written just now is like no other.
    """
    file, wal, folder = map(_seen, (path, Path(f"{path}-wal"), path.parent))
    now = time_ns()
    return file, wal, folder, any(each and now - each[-1] < _JUST_NOW for each in (file, wal)) and object()


def _seen(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def kept(most: int) -> Callable[[_Find], _Find]:
    """Make a function of a path keep what it finds there, for which it is asked again and again.

    Args:
        most: files of which it is kept; it should be small.
    """

    def keeping(find: _Find) -> _Find:
        @lru_cache(most)
        def known(path: Path, state: object, *more: Hashable) -> object:
            return find(path, *more)

        @wraps(find)
        def found(path: Path, *more: Hashable) -> object:
            return known(path.absolute(), state_of(path), *more)

        return cast(_Find, found)

    return keeping

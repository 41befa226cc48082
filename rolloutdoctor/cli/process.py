"""Settings of the process, made before anything heavy is imported; a library leaves them to its caller."""

import atexit
import gc
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_HABITS = "narenas:1,dirty_decay_ms:-1,background_thread:false"
"""One arena that gives nothing back before the end: a step takes the place of the last, in pages that are there."""

_GARBAGE = 50_000
"""New objects between two looks for cycles: imports make a million that stay."""


_LEAST_ADDRESSES, _OF_A_CORE = 9 * 2**27, 2**25
"""Bytes that libraries reserve when they are loaded, and for the thread of each core."""


def too_few_addresses() -> str | None:
    """Say that the process may have too little memory to load its libraries; None if it may have enough.

    Where polars finds no memory for its threads it ends the process in thousands of lines.
    """
    try:
        from resource import RLIM_INFINITY, RLIMIT_AS, getrlimit
    except ImportError:  # not on Windows
        return None
    allowed, least = getrlimit(RLIMIT_AS)[0], _LEAST_ADDRESSES + _OF_A_CORE * (os.cpu_count() or 1)
    if allowed == RLIM_INFINITY or allowed >= least:
        return None
    return (
        f"out of memory: the process may have {allowed / 1e9:.2f} GB (ulimit -v), and its libraries take "
        f"{least / 1e9:.2f}; allow it more"
    )


def prepare_process() -> None:
    """Choose arrow's allocator and its habits, unless the environment does, and look for garbage less often."""
    gc.set_threshold(_GARBAGE)
    # What a library warns its caller of says nothing to a user; whoever asks for it with -W gets it.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", _HABITS)
    if _has_jemalloc():
        # The pool set later is not that of the buffers of files; from two pools, what one frees is lost to the other.
        os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "jemalloc")
    _name_temporary_folder()


def _name_temporary_folder() -> None:
    """Choose the folder of temporary files, even where every one is full.

    Libraries ask which it is while they are imported, and fail if it takes no file; who puts one there says what to do.
    """
    try:
        tempfile.gettempdir()
    except OSError:
        tempfile.tempdir = os.environ.get("TMPDIR") or "/tmp"


class FastExit:
    """The end of a process whose work is done: what was imported is left to the system instead of being taken apart.

    Python deletes every module at its end, which takes torch two thirds of a second. Made first, this is the last of
    the exit handlers to run: threads were waited for, and everybody else has had a turn.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code; without one the process ends in Python's own way."""
        atexit.register(self._leave)

    def _leave(self) -> None:
        # Where something cannot be written any more, Python's own way says so.
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            if self.code is not None:
                os._exit(self.code)


def _has_jemalloc() -> bool:
    """True where arrow is known to have it: other builds would complain on standard error."""
    spec = find_spec("pyarrow")
    if spec is None or spec.origin is None:
        return False
    wheels = Path(spec.origin).parent.parent.glob("pyarrow-*.dist-info/WHEEL")
    return any("manylinux" in wheel.read_text(encoding="utf-8") for wheel in wheels)

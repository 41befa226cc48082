"""How this process gets and gives back the memory of short-lived values."""

import ctypes
import os
from functools import cache

import pyarrow as pa

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's ``malloc.h``."""


@cache
def prepare_memory() -> None:
    """Choose how memory is kept between operations; once in a process, where the system has such a choice.

    To be called before a file is opened: what was allocated before it keeps its ways.
    """
    _keep_freed_memory()
    _choose_pool()


def _keep_freed_memory() -> None:
    """Let glibc keep up to 64 MiB of freed memory for the next allocation.

    Temporaries of a block are half a megabyte and live for microseconds. By default glibc gives their pages back to the
    system every few operations and takes new ones, which costs as much as the arithmetic on them.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    for option, value in ((_MMAP_THRESHOLD, 8 * 2**20), (_TRIM_THRESHOLD, 64 * 2**20), (_TOP_PAD, 2**20)):
        set_option(option, value)


def _choose_pool() -> None:
    """Decode into jemalloc's memory, and have it give back soon what is free.

    Arrow's default keeps more of what steps have left behind. At once would be too soon: the next columns would take
    new pages from the system, which costs as much as half of their decoding. A millisecond holds for arenas to come.
    A process of our own has chosen better before arrow was loaded: see `cli.process`.
    """
    if "ARROW_DEFAULT_MEMORY_POOL" in os.environ or pa.default_memory_pool().backend_name != "mimalloc":
        return
    try:
        pool = pa.jemalloc_memory_pool()
    except NotImplementedError:  # this build of arrow has no jemalloc
        return
    pa.set_memory_pool(pool)
    pa.jemalloc_set_decay_ms(1)

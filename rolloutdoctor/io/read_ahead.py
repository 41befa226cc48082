"""Read ahead: a thread reads the next item while the caller works on the last one."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds that leaving waits for a read under way: a remote store may hang."""


def read_ahead(items: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield the items of a generator that runs, and is closed, in a thread of its own, one item ahead.

    An error of the generator is raised after the items that came before it.
    """
    pool = ThreadPoolExecutor(1, "rolloutdoctor-reader")
    try:
        ahead = pool.submit(next, items, None)
        while (item := ahead.result()) is not None:
            ahead = pool.submit(next, items, None)
            yield item
            # Otherwise the item would stay in memory while the next one is read.
            del item
    finally:
        try:
            closing = pool.submit(items.close)
            pool.shutdown(wait=False)
            wait([closing], _PATIENCE)
        except (RuntimeError, TypeError):
            # At its end the interpreter has ended the thread, and closes files itself.
            pass

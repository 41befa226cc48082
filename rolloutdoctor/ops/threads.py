"""Threads over blocks: each block is one thread's work, and torch starts no threads inside of it.

Blocks fit the cache and are worked on independently, so nothing waits for anything; torch's own threads meet after
every operation, and on cores that are busy each such meeting costs many times the operation.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch

Block = TypeVar("Block")
Found = TypeVar("Found")

_THREADS: ContextVar[int] = ContextVar("threads over blocks", default=1)


@contextmanager
def block_threads() -> Iterator[None]:
    """Use the threads that torch was given for whole blocks; torch itself gets one."""
    before = torch.get_num_threads()
    token = _THREADS.set(before)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _THREADS.reset(token)


def over_blocks(work: Callable[[Block], Found], blocks: Iterable[Block]) -> list[Found]:
    """What `work` makes of every block, in their order; on several threads inside `block_threads`.

    >>> over_blocks(abs, [-1, 2])
    [1, 2]
    """
    threads = _THREADS.get()
    if threads == 1:
        return [work(block) for block in blocks]
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, blocks))

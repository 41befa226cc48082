"""How many threads torch works with."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Give torch one thread; the decoder keeps its own.

    Blocks fit the cache, so a second thread inside an operation gains little, and on busy cores the barriers between
    threads cost many times the work itself. Threads over blocks do not pay either: an operation on a block takes tens
    of microseconds, and so does handing the interpreter from one thread to the other. What pays is another process.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Settings of torch and numpy during the evaluation of steps."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rolloutdoctor.ops.elementwise import unwarned


@contextmanager
def evaluation_mode() -> Iterator[None]:
    """Evaluate on one torch thread, in torch's inference mode and without numpy's warnings.

    One thread: blocks fit the cache, so a second thread inside an operation gains little, and on busy cores the
    barriers between threads cost many times the work itself. Threads over blocks do not pay either: an operation on a
    block takes tens of microseconds, and so does handing the interpreter from one thread to the other. What pays is
    another process. The decoder keeps its own threads.

    Inference mode: no derivative is left to autograd, and what torch records for it of each tensor and view takes a
    tenth of the time of small steps. A tensor that is made in here cannot be changed in place outside.
    """
    with one_thread(), torch.inference_mode(), unwarned():
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

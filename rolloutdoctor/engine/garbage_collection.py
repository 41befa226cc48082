"""Frequency of Python's garbage collection during a command."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RECORDS = 20_000
"""Objects that are made before Python looks for cycles among them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for cycles of objects less often.

    Rules make thousands of small records a second, which live to the end. To look through them every 700 objects takes
    5 to 10 % of the time of a run of small steps and finds nothing: what holds a step's tokens is in no cycle.
    """
    before = gc.get_threshold()
    # 0 is how a program switches it off, and another thread that is in here sets it back.
    if not 0 < before[0] < RECORDS:
        yield
        return
    gc.set_threshold(RECORDS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

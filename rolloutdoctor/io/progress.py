"""Progress of a command, and the unit in which it counts."""

from collections.abc import Callable, Iterable
from typing import Literal

Progress = Callable[[int, int], None]
"""Called with what is done and what there is to do in all: tokens or rows of a run, as its `unit` says, bytes of a
dump."""

Unit = Literal["tokens", "rows"]


def common_unit(units: Iterable[Unit]) -> Unit:
    """Return the unit in which several files, or runs, can all be counted.

    >>> common_unit(["tokens", "tokens"]), common_unit(["tokens", "rows"]), common_unit([])
    ('tokens', 'rows', 'rows')
    """
    return "tokens" if set(units) == {"tokens"} else "rows"

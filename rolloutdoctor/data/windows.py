"""Windows of steps: a trainer that logs every tenth step logs means over ten."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Window:
    """Consecutive steps, and the means over them that were logged.

    Attributes:
        first: its first step.
        last: its last step, under which the means were logged.
        values: name of a metric to its mean.
    """

    first: int
    last: int
    values: Mapping[str, float] = field(default_factory=dict)


def windows_at(steps: Sequence[int], interval: int, values: Iterable[Mapping[str, float]]) -> tuple[Window, ...]:
    """Return the windows that end at some logged steps: each starts after the one before.

    Args:
        steps: the logged steps, in order.
        interval: steps of the first window; steps are numbered from 1.
        values: name to mean, for each of them.
    """
    starts = (max(1, steps[0] - interval + 1), *(step + 1 for step in steps[:-1])) if steps else ()
    return tuple(map(Window, starts, steps, values))


def window_of(windows: Sequence[Window], step: int) -> Window | None:
    """Return the window that a step is in, or None."""
    place = bisect_left(windows, step, key=lambda window: window.last)
    return windows[place] if place < len(windows) and windows[place].first <= step else None

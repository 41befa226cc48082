"""Windows of optimizer steps: a trainer that logs every tenth step logs means over ten."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MEAN = "mean/"
"""Begins the name under which tables have a mean over several steps, so that it is not taken for a value of one."""


@dataclass(frozen=True)
class Window:
    """Consecutive optimizer steps, and the means over them that were logged.

    Attributes:
        first: its first step.
        last: its last step, under which the means were logged.
        values: name of a metric to its mean.
        span: optimizer steps that the rows of one step serve.
    """

    first: int
    last: int
    values: Mapping[str, float] = field(default_factory=dict)
    span: int = 1

    @property
    def size(self) -> int:
        """Return the number of steps with rows that the means are over."""
        return (self.last - self.first + 1) // self.span

    def holds(self, step: int) -> bool:
        """True if the optimizer steps that the rows of a step serve are all in the window."""
        return self.first <= step <= self.last and (step - self.first) % self.span == 0


Lines = Mapping[int, Mapping[str, float]]
"""Optimizer step to the metrics that were logged there, each a mean over the steps since the line before."""


def windows_of(
    lines: Lines, interval: int, span: int = 1, of_generation: Callable[[str], bool] = lambda name: False
) -> tuple[Window, ...]:
    """Return the smallest windows of whole lines that hold the optimizer steps of generated batches as a whole.

    Args:
        lines: what was logged.
        interval: steps of the first line; steps are numbered from 1.
        span: optimizer steps of one pass over a generated batch.
        of_generation: tells the metrics that are means over the batches generated since the line before; others are
            means over the optimizer steps.
    """
    steps = sorted(lines)
    if not steps:
        return ()
    begin = max(1, steps[0] - interval + 1)
    windows: list[Window] = []
    first, parts = begin, list[tuple[int, int]]()
    for before, last in pairwise([begin - 1, *steps]):
        parts.append((before + 1, last))
        if (last - begin + 1) % span == 0:
            windows.append(Window(first, last, _means(lines, parts, (begin, span), of_generation), span))
            first, parts = last + 1, []
    return tuple(windows)


def _means(
    lines: Lines, parts: Sequence[tuple[int, int]], grid: tuple[int, int], of_generation: Callable[[str], bool]
) -> dict[str, float]:
    """Means over adjacent lines, given by their first and last steps; only of metrics that all of them have."""
    begin, span = grid
    names = dict.fromkeys(name for _, last in parts for name in lines[last])
    means = {}
    for name in names:
        total = weights = 0.0
        for first, last in parts:
            # Batches are generated at every span-th step.
            generations = (last - begin) // span - (first - 1 - begin) // span
            weight = generations if of_generation(name) else last - first + 1
            if weight and name not in lines[last]:
                break
            total += weight * lines[last].get(name, 0.0)
            weights += weight
        else:
            if weights:
                means[name] = lines[parts[0][1]][name] if len(parts) == 1 else total / weights
    return means


def window_of(windows: Sequence[Window], step: int) -> Window | None:
    """Return the window that the rows of a step are in, or None."""
    place = bisect_left(windows, step, key=lambda window: window.last)
    return windows[place] if place < len(windows) and windows[place].holds(step) else None

"""`Vital`: a logged quantity over the run, as the first screen of a log shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Vital:
    """A quantity of the trainer's log.

    Attributes:
        name: canonical name, as in `rolloutdoctor metrics`.
        title: how tables call it.
        metric: its name in the log.
        unit: of the values.
        steps: steps at which it was logged, in order.
        series: its value at each.
        marks: step at which a finding about it begins, and the code of its rule.
    """

    name: str
    title: str
    metric: str
    unit: str
    steps: tuple[int, ...]
    series: tuple[float, ...]
    marks: tuple[tuple[int, str], ...] = ()

    @property
    def first(self) -> float:
        """The first value."""
        return self.series[0]

    @property
    def last(self) -> float:
        """The last value."""
        return self.series[-1]

    @property
    def least(self) -> float:
        """The smallest value."""
        return min(self.series)

    @property
    def largest(self) -> float:
        """The largest value."""
        return max(self.series)


def buckets(series: Sequence[float], count: int) -> list[float]:
    """Return the means of `count` consecutive parts of a series, or the series where it is shorter.

    >>> buckets([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    size = len(series)
    if size <= count:
        return list(series)
    ends = [size * part // count for part in range(count + 1)]
    return [sum(series[start:end]) / (end - start) for start, end in pairwise(ends)]

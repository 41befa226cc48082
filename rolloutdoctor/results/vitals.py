"""`Vital`: a logged quantity over the run, as the first screen of a log shows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum


@dataclass(frozen=True)
class Trend:
    """How the last third of a series differs from the first.

    Attributes:
        lines: values of the series.
        first: mean of the first third.
        last: mean of the last third.
        error: standard error of their difference; infinite of fewer than six values.
        rank: normal score of Kendall's rank correlation with time.
        of_ends: change between the medians of both ends, in standard errors of the noise of neighbours.
    """

    lines: int
    first: float
    last: float
    error: float
    rank: float
    of_ends: float

    @property
    def change(self) -> float:
        """From the first third to the last."""
        return self.last - self.first

    def exceeds(self, errors: float) -> bool:
        """Tell whether the change, up or down as `errors` is above 0 or below, is larger than so many of its errors."""
        return self.change * errors > 0 and abs(self.change) > abs(errors) * self.error


@dataclass(frozen=True)
class Vital:
    """A quantity of the trainer's log.

    Attributes:
        name: canonical name, as in `rolloutdoctor explain metrics`.
        title: how tables call it.
        metric: its name in the log.
        unit: of the values.
        steps: steps at which it was logged, in order.
        series: its value at each.
        marks: step at which a finding about it begins, and the code of its rule.
        trend: from its first third to its last; None of what the first sentence does not tell.
        lines: of the log that have it: of a long one `series` has fewer; 0: it has all.
    """

    name: str
    title: str
    metric: str
    unit: str
    steps: tuple[int, ...]
    series: tuple[float, ...]
    marks: tuple[tuple[int, str], ...] = ()
    trend: Trend | None = None
    lines: int = 0

    @property
    def first(self) -> float:
        """The first value."""
        return self.series[0]

    @property
    def last(self) -> float:
        """The last value."""
        return self.series[-1]

    @property
    def early(self) -> float:
        """The mean of the first tenth: of one value, where there are fewer than twenty."""
        return mean(self.series[: self._tenth])

    @property
    def late(self) -> float:
        """The mean of the last tenth."""
        return mean(self.series[-self._tenth :])

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return mean(self.series)

    @property
    def _tenth(self) -> int:
        return max(1, len(self.series) // 10)

    @property
    def least(self) -> float:
        """The smallest value."""
        return min(self.series)

    @property
    def largest(self) -> float:
        """The largest value."""
        return max(self.series)


def mean(values: Sequence[float]) -> float:
    """Return the mean of finite values, rounded once in the sum and once in the quotient."""
    try:
        return fsum(values) / len(values)
    except OverflowError:
        return fsum(value / len(values) for value in values)

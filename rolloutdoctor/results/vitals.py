"""`Vital`: a logged quantity over the run, as the first screen of a log shows it."""

from dataclasses import dataclass


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

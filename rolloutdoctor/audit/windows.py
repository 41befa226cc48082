"""Compare metrics that were logged as means over several steps: a window is compared once all its steps were read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import fsum

from rolloutdoctor.audit.tally import ComparedValue, QuantityTally, add_tallies
from rolloutdoctor.data.windows import Window
from rolloutdoctor.ops.logged_digits import Digits, rounding_of
from rolloutdoctor.ops.unit_roundoff import SINGLE


@dataclass(frozen=True)
class StepValue:
    """Contribution of one step to a mean.

    Attributes:
        stage: stage of the metric in the audit.
        value: recomputed value.
        radius: how far rounding may put the trainer's value from it.
        doubt: why a disagreement is inconclusive; empty if it is not.
    """

    stage: str
    value: float
    radius: float
    doubt: str = ""


@dataclass(frozen=True)
class OpenWindow:
    """One metric of a window of which some steps were read; those of parts of a run add up.

    Attributes:
        name: of the metric.
        stage: its stage.
        first: first step of the window.
        last: its last step.
        logged: the mean that was logged.
        rounding: how far the rounding of the log may put it from the mean.
        steps: steps that were read, in order.
        values: recomputed value of each.
        radii: how far rounding may put the trainer's value from it.
        doubt: why a disagreement is inconclusive.
        size: steps with rows that the mean is over.
    """

    name: str
    stage: str
    first: int
    last: int
    logged: float
    rounding: float
    steps: tuple[int, ...]
    values: tuple[float, ...]
    radii: tuple[float, ...]
    doubt: str
    size: int

    def __add__(self, other: "OpenWindow") -> "OpenWindow":
        steps = (*self.steps, *other.steps)
        order = sorted(range(len(steps)), key=steps.__getitem__)
        values, radii = (*self.values, *other.values), (*self.radii, *other.radii)
        return OpenWindow(
            self.name,
            self.stage,
            self.first,
            self.last,
            self.logged,
            self.rounding,
            tuple(steps[place] for place in order),
            tuple(values[place] for place in order),
            tuple(radii[place] for place in order),
            min((doubt for doubt in (self.doubt, other.doubt) if doubt), default=""),
            self.size,
        )

    def compared(self) -> ComparedValue:
        """Return the mean beside the recomputed one, once all steps were read.

        A mean is as far off as its terms are on average. Transformers adds losses up in float32, so that a mean of n
        terms loses at most n u of the mean of their sizes, u = 2^-24.
        """
        count = len(self.steps)
        size = fsum(map(abs, self.values)) / count
        radius = fsum(self.radii) / count + count * SINGLE * size + self.rounding
        mean = fsum(self.values) / count
        return ComparedValue(self.stage, self.last, self.logged, mean, radius, self.doubt, self.rounding)

    def tally(self) -> QuantityTally:
        """Compare the mean, once all steps were read."""
        return replace(self.compared().tally(), window=len(self.steps))


OpenWindows = Mapping[str, OpenWindow]
"""Last step of a window and name of a metric, ``9 kl``, to what was read of it."""


def join(left: OpenWindows, right: OpenWindows) -> tuple[dict[str, QuantityTally], dict[str, OpenWindow]]:
    """Add the windows of two parts of a run; return what can be compared now, and the windows that stay open."""
    total, closed = dict(left), dict[str, QuantityTally]()
    for key, window in right.items():
        total[key] = total[key] + window if key in total else window
    for key in sorted(right, key=lambda key: (total[key].last, key)):
        if len(total[key].steps) == total[key].size:
            open_window = total.pop(key)
            closed = add_tallies(closed, {open_window.name: open_window.tally()})
    return closed, total


def opened(
    window: Window, step: int, values: Mapping[str, StepValue], digits: Mapping[str, tuple[Digits, ...]]
) -> OpenWindows:
    """Return what one step adds to its window.

    Args:
        window: that the step is in.
        step: its number.
        values: name to what the step adds.
        digits: name of a metric to what its values may have been rounded to.
    """
    return {
        f"{window.last} {name}": OpenWindow(
            name,
            step_value.stage,
            window.first,
            window.last,
            window.values[name],
            rounding_of(digits, name, window.values[name]),
            (step,),
            (step_value.value,),
            (step_value.radius,),
            step_value.doubt,
            window.size,
        )
        for name, step_value in values.items()
        if name in window.values
    }

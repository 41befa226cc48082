"""A KL that was beyond its limit for long, and fell back."""

from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, kl_coefficient, number, own_name
from rolloutdoctor.rules.numbers_rule import step_at
from rolloutdoctor.rules.series import smoothed
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


def fell_back(run: Measured, values: "Values", limit: float, long: float, context: Context) -> Judgement | None:
    """Information on running medians that were above a limit in such a share of the lines, and are not at the end."""
    import numpy as np

    above = smoothed(values, _width(values)) > limit
    if above.mean() < long or above[-1]:
        return None
    # A line between two others may be below the limit, and its median is not.
    begun, ended = np.flatnonzero(above)[[0, -1]]
    start = max(begun - _width(values) // 2, 0)
    places = start + np.flatnonzero(values[start : ended + _width(values) // 2 + 1] > limit)
    first, last = (step_at(run, int(place)) for place in places[[0, -1]])
    most, end = float(values[places].max()), float(np.median(values[-_width(values) :]))
    words = (
        f"the KL was above {limit:g} nat in {counted(len(places), 'line')} of {len(values):,}, between steps "
        f"{first} and {last}, {number(most)} at most, and fell back to {number(end)}"
    )
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}.",
        evidence=f"running medians of {counted(len(values), 'line')}",
        advice=f"compare responses before step {first} and after step {last}; if it recurs, raise "
        f"{kl_coefficient(context)} or lower {own_name(context, 'the learning rate')}",
        measures={"kl_most": Measure(most, "nats"), "kl_last": Measure(end, "nats"), "onset": Measure(first, "step")},
        hinders=True,
    )


def _width(values: "Values") -> int:
    """A tenth of the lines, three at least."""
    return max(3, len(values) // 10)

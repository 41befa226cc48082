"""Evaluations of 0 that a loop fills in for the steps at which it does not evaluate."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.metric_names.generic import is_held_out

_FEWEST = 6
"""Values that are not 0: those but the first and the last, at which many loops evaluate besides, show the interval."""


def without_filled(metrics: LoggedMetrics, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics without evaluations of 0 between those that come at one interval.

    Args:
        metrics: of a log.
        tell: takes what is left out.
    """
    filled: dict[str, frozenset[StepKey]] = {}
    for name in filter(is_held_out, metrics.names()):
        if places := _filled(
            [(key, value) for key in metrics.steps() if (value := metrics.at(key).get(name)) is not None]
        ):
            filled[name] = places
    if not filled:
        return metrics
    are = "is 0" if len(filled) == 1 else "are 0"
    tell(f"{', '.join(sorted(filled))} {are} in steps without an evaluation: these zeros are left out")
    return metrics.without(filled)


def _filled(logged: Sequence[tuple[StepKey, float]]) -> frozenset[StepKey]:
    """Return where zeros are between values that come at one interval of two places or more; nothing of others."""
    other = [place for place, (_, value) in enumerate(logged) if value]
    if not _FEWEST <= len(other) < len(logged):
        return frozenset()
    gaps = [after - before for before, after in pairwise(other[1:-1])]
    least = min(gaps)
    if least < 2 or math.gcd(*gaps) != least:
        return frozenset()
    # An evaluation at its turn may be 0 in truth.
    return frozenset(key for place, (key, value) in enumerate(logged) if not value and (place - other[1]) % least)

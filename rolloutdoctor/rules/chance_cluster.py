"""Whether a few high values of a series are no level of it: a spike, or chance that put them together."""

from math import comb
from typing import TYPE_CHECKING

from rolloutdoctor.rules.series import FALSE_ALARM, ending

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


def is_spike(medians: "Values", level: float, fewest: int) -> bool:
    """Tell a few high running medians, fewer than a level takes, of a series that does not begin with them."""
    return int(medians.argmax()) > fewest // 2 and int((medians > level).sum()) < fewest


def is_chance_cluster(values: "Values", medians: "Values", level: float) -> bool:
    """Tell whether chance puts so many values above a level around the largest running median of a sparse series.

    Where most neighbours are equal, as of rewards that are 0 but in a few steps, medians and their errors jump. So the
    values of the stretch whose medians are above the level are counted: is one such stretch, anywhere in the series,
    likely under a binomial of the share of all values above the level? Where the last values are all low, and are more
    of them than that share allows, the series did fall, and the answer is no.
    """
    import numpy as np

    if np.median(np.abs(np.diff(values))) > 0 or ending(values <= level, 1, FALSE_ALARM) is not None:
        return False
    top, is_above = int(np.argmax(medians)), medians > level
    low, high = np.flatnonzero(~is_above[:top]), np.flatnonzero(~is_above[top:])
    start, end = (int(low[-1]) + 1 if len(low) else 0), (top + int(high[0]) if len(high) else len(values))
    count, hits, share = end - start, int((values[start:end] > level).sum()), float((values > level).mean())
    tail = sum(comb(count, hit) * share**hit * (1 - share) ** (count - hit) for hit in range(hits, count + 1))
    return len(values) * tail > FALSE_ALARM

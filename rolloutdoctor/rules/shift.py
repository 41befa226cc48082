"""When a series went from one level to another, and whether it went suddenly or slowly."""

from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

from rolloutdoctor.rules.series import crossing, memory

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


@dataclass(frozen=True)
class Shift:
    """A change from one level to another.

    Attributes:
        at: place of the first value of the new level; of a steady change, of the first that left the old one.
        is_steady: whether it took more than a quarter of the values, and not a few; None where its last part came late,
            and a quick way fits as well.
    """

    at: int
    is_steady: bool | None

    def words(self, sudden: str, steady: str, step: int) -> str:
        """Say what happened when.

        >>> [Shift(3, is_steady).words("blew up", "rose", 3) for is_steady in (True, False, None)]
        ['rose steadily from step 3 on', 'blew up at step 3', 'rose from step 3 on']
        """
        if self.is_steady is False:
            return f"{sudden} at step {step}"
        return f"{steady}{' steadily' if self.is_steady else ''} from step {step} on"


def shift(
    values: "Values",
    first: float,
    last: float,
    level: float,
    noise: float = 0.0,
    raw: "Values | None" = None,
) -> Shift:
    """Return where a series went from one level to another.

    Args:
        values: the series, or its running medians.
        first: the level before.
        last: the level after, another one.
        level: beyond which a value is of the level after; for what grows by factors the geometric mean of both.
        noise: standard deviation of a value at the level before.
        raw: the series that `values` are the running medians of.
    """
    below = last < first
    # What is within the noise of the old level has not begun to leave it.
    least = min(0.5, _BEYOND * noise / abs(last - first))
    shares = (max(_BEGUN, least), max(_MOST[0], least), _MOST[1])
    levels = (level, *(first + share * (last - first) for share in shares))
    places = [crossing(values, each, below=below) for each in levels]
    at, begun, tenth, nearly = (len(values) - 1 if place is None else place for place in places)
    most = max(_FEW, len(values) / 4)
    since = _since_when(values if raw is None else raw, most / len(values))
    if since is not None:
        # Noise hides how early a change began, which the way that fits best tells, and never before it is seen.
        left = _first_beyond(values, first + _BEGUN * (last - first), below=below)
        return Shift(min(begun, max(round(since * len(values)), left)), is_steady=True)
    return Shift(begun, is_steady=None) if nearly - tenth > most else Shift(at, is_steady=False)


def _first_beyond(values: "Values", level: float, *, below: bool) -> int:
    """Return the first value beyond a level, whatever comes after it."""
    import numpy as np

    return int(np.argmax(values < level if below else values > level))


def _since_when(values: "Values", most: float) -> float | None:
    """Return the place, as a share, from which on a series goes straight from one level to another for long.

    None if it does not take more than a share of the values for it.

    The slow way that fits best leaves smaller squares than the quick one, and so by the Bayesian criterion of one
    parameter, the length of the way. In noise the last value that is far from the new level may come late after a
    sudden change, and that proves nothing.
    """
    import numpy as np

    low, high = np.quantile(values, (0.1, 0.9))
    within = np.clip(values, low - (high - low), high + (high - low))
    parts = np.array([part.mean() for part in np.array_split(within, min(len(values), _PARTS))])
    at, edges = (np.arange(len(parts)) + 0.5) / len(parts), np.linspace(0, 1, _PARTS + 1)
    since, until = (edges[place][:, None] for place in np.triu_indices(len(edges)))
    is_long = (until - since)[:, 0] > most
    if most >= 1 or not (span := float(np.ptp(parts))):
        return None
    ways = np.clip((at - since) / np.maximum(until - since, 1e-9), 0, 1)
    ways, parts = ways - ways.mean(axis=1, keepdims=True), (parts - parts.mean()) / span
    squares, explained = (parts**2).sum(), (ways * parts).sum(axis=1) ** 2 / np.maximum((ways**2).sum(axis=1), 1e-300)
    quick, slow = (float(squares - explained[is_part].max()) for is_part in (~is_long, is_long))
    kept = memory(parts)
    count = len(parts) * (1 - kept) / (1 + kept)
    is_slow = count * log((quick + _EXACT) / (slow + _EXACT)) > log(count)
    return float(since[is_long][np.argmax(explained[is_long])][0]) if is_slow else None


_EXACT = 1e-9
"""Squares below which a way fits as well as it can, of values whose range is 1."""

_PARTS = 50
"""Parts of a series whose means are compared with straight ways from edge to edge."""

_BEGUN = 0.05
"""Share of a steady change from which on it has begun."""

_BEYOND = 3.0
"""Standard deviations of the noise of one value, beyond which the running median of three has left a level."""

_MOST = (0.1, 0.9)
"""Shares of a change between which it is timed: its tails may be long."""

_FEW = 5
"""Values that a sudden change may take."""

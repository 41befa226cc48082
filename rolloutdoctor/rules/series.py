"""Levels, jumps and crossings of a short, noisy series: a number for each logged step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import copysign, inf, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float64]


@dataclass(frozen=True)
class Ends:
    """The level at which a series starts and ends: medians of its first and its last tenth, three values at least.

    Attributes:
        first: at the start.
        last: at the end.
        noise: standard deviation from one value to the next, without the trend.
        count: values that each median is of.
        memory: correlation of the noise of neighbouring values.
    """

    first: float
    last: float
    noise: float
    count: int
    memory: float = 0.0

    @property
    def change(self) -> float:
        """From the start to the end."""
        return self.last - self.first

    @property
    def error(self) -> float:
        """Standard error of a difference of two means of so many values, of independent noise."""
        return self.noise * sqrt(2 / self.count)

    @property
    def error_with_memory(self) -> float:
        """The same of noise that lasts, where the largest of many medians is compared.

        Of noise with a memory m the differences of neighbours have 1 - m of its variance, and a long mean (1 + m) /
        (1 - m) times that of independent noise.
        """
        return self.noise * sqrt(2 / self.count * (1 + self.memory)) / (1 - self.memory)

    def or_noise_of(self, part: "Values") -> "Ends":
        """Return the same levels with the noise of a part of the series where that is larger."""
        return replace(self, noise=max(self.noise, _typical_noise(part)))

    @property
    def errors(self) -> float:
        """The change in such errors; infinite where nothing is noisy."""
        return abs(self.change) / self.error if self.error > 0 else (float("inf") if self.change else 0.0)


def ending(is_so: "NDArray[np.bool_]", fewest: int, chance: float) -> int | None:
    """Return the first of the places at the end in all of which something is so; None if they are few or chance.

    Args:
        is_so: of each place.
        fewest: such places.
        chance: how probable so many may be if they are as common as before.
    """
    import numpy as np

    other = np.flatnonzero(~is_so)
    since = int(other[-1]) + 1 if len(other) else 0
    count = len(is_so) - since
    is_chance = since > 0 and float(is_so[:since].mean()) ** count > chance
    return None if count < fewest or is_chance else since


OF_A_MEDIAN = 1.2533
"""Standard error of a median over that of the mean of the same normal values, sqrt(pi / 2)."""

FALSE_ALARM = 1e-3
"""Probability that a value of a run whose steps are drawn alike lies beyond `chance_limit`."""

FEWEST_OF_TAIL = 50
"""Values below which there is no tail to continue."""


def chance_limit(values: "Values", usual: float) -> float:
    """Return how large the largest of so many values may be by chance: their own upper tail, continued.

    The logarithm of a value above the 99th percentile is taken to fall off as it does between the 90th and there, which
    is a Pareto tail; that of log-normal values is thinner. 0 of fewer than `FEWEST_OF_TAIL`.

    Args:
        values: of the steps.
        usual: values above it are candidates, and do not say how heavy the tail is.
    """
    import numpy as np

    sizes = np.log(values[(values > 0) & (values <= usual)])
    if len(sizes) < FEWEST_OF_TAIL:
        return 0.0
    ninth, last = np.quantile(sizes, (0.9, 0.99))
    decades = np.log10(0.01 * len(values) / FALSE_ALARM)
    return float(np.exp(min(last + (last - ninth) * max(decades, 0.0), 700.0)))


def ends(values: "Values | Sequence[float]") -> Ends:
    """Return the levels at which a series of three values or more starts and ends."""
    import numpy as np

    series = np.asarray(values, dtype=np.float64)
    count = max(3, len(series) // 10)
    return Ends(
        float(np.median(series[:count])), float(np.median(series[-count:])), noise(series), count, memory(series)
    )


def errors_of_ends(values: "Values") -> float:
    """Return how far the median at the end is above that at the start, in standard errors of noise that lasts.

    A rise within the first third adds to the deviations there, and the means of thirds may hide it. 0 of so few values
    that they do not tell how long their noise lasts.
    """
    if len(values) < _LONG:
        return 0.0
    level = ends(values)
    error = OF_A_MEDIAN * level.error_with_memory
    return level.change / error if error else copysign(inf, level.change) if level.change else 0.0


def rank_with_time(values: "Values") -> float:
    """Return Kendall's rank correlation with time as a normal score: of independent noise it is a standard normal.

    >>> import numpy as np
    >>> round(rank_with_time(np.arange(7.0)), 2), rank_with_time(np.array([1.0, 1.0, 1.0]))
    (3.15, 0.0)
    """
    count = len(values)
    return _rises(values) / sqrt(count * (count - 1) * (2 * count + 5) / 18) if count > 1 else 0.0


def _rises(values: "Values") -> int:
    """Return in how many pairs the later value is the larger one, less those in which it is the smaller one."""
    import numpy as np

    if len(values) <= _FEW:
        return int(np.triu(np.sign(values[None, :] - values[:, None])).sum())
    half = len(values) // 2
    before, after = values[:half], np.sort(values[half:])
    larger = len(after) - np.searchsorted(after, before, "right")
    return int((larger - np.searchsorted(after, before, "left")).sum()) + _rises(before) + _rises(values[half:])


_FEW = 64
"""Values all pairs of which are compared at once."""


def noise(values: "Values") -> float:
    """Return the standard deviation of independent noise on a slow trend, from the differences of neighbours.

    The median of absolute differences is 0.6745 sqrt(2) standard deviations of a normal one, and does not see jumps;
    where most neighbours are equal it is 0, and the mean square stands in for it.
    """
    import numpy as np

    return _typical_noise(values) or (float(np.sqrt(np.mean(np.diff(values) ** 2) / 2)) if len(values) > 1 else 0.0)


def _typical_noise(values: "Values") -> float:
    """Return the same from the median alone: 0 where most neighbours are equal."""
    import numpy as np

    steps = np.abs(np.diff(values))
    return _median_size(steps, least_distance(values)) / (0.6745 * sqrt(2)) if len(steps) else 0.0


def least_distance(values: "Values") -> float:
    """Return how far apart the two nearest different values are; 0 if all are equal.

    The mean of N rewards of 0 and 1 is a multiple of 1/N, the largest such number that it may be.
    """
    import numpy as np

    apart = np.diff(np.unique(values))
    return float(apart.min()) if len(apart) else 0.0


def _median_size(sizes: "Values", unit: float) -> float:
    """Return the median of sizes that are rounded to a unit, as if those of each multiple lay evenly around it.

    0 where most are 0: so few others tell no size.

    The difference of two means of eight rewards of 0 and 1 is a multiple of an eighth: the plain median of such
    differences is 0.6 to 1.6 times that of normal ones of the same variance.

    >>> import numpy as np
    >>> _median_size(np.array([0.0, 1.0, 1.0, 1.0, 2.0]), 1.0), _median_size(np.array([0.25, 0.5, 3.0]), 1e-9)
    (1.0, 0.5)
    """
    import numpy as np

    ordered, middle = np.sort(sizes), []
    if not ordered[len(sizes) // 2]:
        return 0.0
    for place in ((len(sizes) - 1) // 2, len(sizes) // 2):
        low, high = max(ordered[place] - unit / 2, 0.0), ordered[place] + unit / 2
        since, until = np.searchsorted(ordered, low), np.searchsorted(ordered, high, "right")
        middle.append(low + (place + 0.5 - since) / (until - since) * (high - low))
    return float(np.mean(middle))


def memory(values: "Values") -> float:
    """Return the correlation of neighbouring noise, from 0 to 0.5: of differences over two steps and over one.

    Where it decays by a factor m a step, their variances are as (1 + m) to 1. A trend is no memory: its part, the
    median difference, is taken off.
    """
    import numpy as np

    if len(values) < _LONG:
        return 0.0
    spreads, unit = [], least_distance(values)
    for lag in (1, 2):
        apart = values[lag:] - values[:-lag]
        spreads.append(_median_size(np.abs(apart - np.median(apart)), unit))
    return min(0.5, max(0.0, (spreads[1] / spreads[0]) ** 2 - 1)) if spreads[0] > 0 else 0.0


def change_of_means(first: "Values", last: "Values", correlation: float) -> tuple[float, float]:
    """Return how the mean of two parts of a series differs, and its standard error, of noise with such a memory."""
    variances = (float(part.var(ddof=1)) / len(part) for part in (first, last))
    return float(last.mean() - first.mean()), sqrt(sum(variances) * (1 + correlation) / (1 - correlation))


def thirds(values: "Values") -> tuple[float, float, float, float]:
    """Return the means of the first and the last third, their difference and its standard error."""
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    return (float(first.mean()), float(last.mean()), *change_of_means(first, last, memory(values)))


def fall_from_best_fifth(values: "Values", *, errors: float, share: float, beyond: float) -> tuple[float, float] | None:
    """Return the means of the best and of the last fifth of a series that fell from one to the other; None of others.

    Args:
        values: the series.
        errors: standard errors of the difference, at least.
        share: of the range of such means, at least; of what was gained since the first fifth, where the last is above
            it, beyond noise: a series that comes back from a hump has not lost its gain.
        beyond: standard errors of that.
    """
    import numpy as np

    fifth, correlation = len(values) // 5, memory(values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    means = (sums[fifth:] - sums[:-fifth]) / fifth
    top = int(np.argmax(means))
    parts = values[:fifth], values[top : top + fifth], values[-fifth:]
    change, error = change_of_means(parts[1], parts[2], correlation)
    if -change <= max(errors * error, share * float(np.ptp(means))):
        return None
    first, best, last = (float(part.mean()) for part in parts)
    weights = (share, 1 - share, -1.0)
    variance = sum(each**2 * float(part.var(ddof=1)) for each, part in zip(weights, parts, strict=True)) / fifth
    more = share * first + (1 - share) * best - last
    is_hump = last > first and more <= beyond * sqrt(variance * (1 + correlation) / (1 - correlation))
    return None if is_hump else (best, last)


_LONG = 40
"""Values that tell a memory: of fewer its estimate is noise itself."""


def error_of_answers(values: "Values", best: float, count: int) -> float:
    """Return the least standard error of a difference of two means of shares of right answers.

    A share of N answers is a multiple of 1/N, so that two different values are 1/N apart or more: sqrt(best / N) bounds
    its deviation.

    Args:
        values: the shares.
        best: the largest level of them.
        count: values that each mean is of.
    """
    return sqrt(max(best, 0.0) * least_distance(values) * 2 / count)


def smoothed(values: "Values | Sequence[float]", width: int) -> "Values":
    """Return running medians over `width` finite values, an odd number; at the ends over those that are there."""
    import numpy as np
    import polars as pl

    series = pl.Series(np.asarray(values, dtype=np.float64))
    # Window by window, the time would be the product of both lengths: a width is often a tenth of the run.
    return series.rolling_median(width // 2 * 2 + 1, min_samples=1, center=True).to_numpy()


PASSING = 0.02
"""Share of the lines below which several outliers are passing, if nothing changed after them."""


def is_passing(values: "Values", odd: "NDArray[np.bool_]", *, is_state: bool = False) -> bool:
    """Tell whether a few outliers left no trace: the level after them is at most twice that right before them.

    That is the level right after them, or of the last third. Outliers among the last lines may be the beginning of
    something; of values that are a state of the weights, as a KL is, a single one passed with the lines after it that
    are back. What the values had risen to by then, or rise to later, as a KL does in every training, is no trace.
    """
    import numpy as np

    places = np.flatnonzero(odd)
    few = len(places) == 1 or len(places) < PASSING * len(values)
    if not len(places) or not few or places[-1] == len(values) - 1:
        return False
    is_late = places[-1] >= len(values) - 3
    if is_late and not (is_state and len(places) == 1):
        return False
    size = max(3, len(values) // 10)
    before, last = values[: places[0]][-size:], values[-max(1, len(values) // 3) :]
    after = values[places[-1] + 1 :][:size]
    reference = before if len(before) >= 3 else values
    level = float(after.max()) if is_late else min(float(np.median(last)), float(np.median(after)))
    return level <= 2 * max(float(np.median(reference)), 0.0)


def crossing(values: "Values | Sequence[float]", level: float, *, below: bool, width: int = 3) -> int | None:
    """Return the first value beyond a level from which on the running median stays beyond it; None if there is none."""
    import numpy as np

    medians, series = smoothed(values, width), np.asarray(values, dtype=np.float64)
    inside = np.flatnonzero(~(medians < level if below else medians > level))
    since = 0 if not len(inside) else int(inside[-1]) + 1
    # Of the first values the median is of few, so that it may lie beyond before one of them does.
    beyond = np.flatnonzero(series[since:] < level if below else series[since:] > level)
    return since + int(beyond[0]) if len(beyond) else None


def leaves(values: "Values", first: float, last: float) -> int:
    """Return the place from which on a noisy series is nearer to a lower level than to the first: the likeliest one.

    Of a single value noise decides; the values above the middle of both levels, added up, are most before the change.
    """
    import numpy as np

    half = (first - last) / 2
    return min(int(np.argmax(np.cumsum(np.clip(values - last - half, -half, half)))) + 1, len(values) - 1)

"""What a picture is made of: plain numbers, gathered in one pass over a run, that every view can draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from rolloutdoctor.results.errors import UsageError, nearest

FINE_BINS = 729
"""A histogram never has more bins; three of them become one when it would."""


@dataclass(frozen=True)
class Histogram:
    """Exact counts in bins of width ``3 ** power``, centred on the multiples of the width; histograms add up.

    A bin around zero holds zero and nothing of one sign only, and three bins make one of the next width, so the
    counts do not depend on the order in which values came.

    Attributes:
        power: the width is 3 to this power.
        first: multiple of the width that the first bin is centred on.
        counts: values in each bin.
        nonfinite: NaN and infinite values, which are in no bin.
    """

    power: int = 0
    first: int = 0
    counts: tuple[int, ...] = ()
    nonfinite: int = 0

    @property
    def width(self) -> float:
        """Width of a bin."""
        return float(3.0**self.power)

    @property
    def total(self) -> int:
        """Finite values."""
        return sum(self.counts)

    def __add__(self, other: "Histogram") -> "Histogram":
        nonfinite = self.nonfinite + other.nonfinite
        if not self.counts or not other.counts:
            some = self if self.counts else other
            return Histogram(some.power, some.first, some.counts, nonfinite)
        power = max(self.power, other.power)
        one, two = self.widened(power), other.widened(power)
        while max(one.first + len(one.counts), two.first + len(two.counts)) - min(one.first, two.first) > FINE_BINS:
            power += 1
            one, two = one.widened(power), two.widened(power)
        first = min(one.first, two.first)
        counts = [0] * (max(one.first + len(one.counts), two.first + len(two.counts)) - first)
        for part in (one, two):
            here = slice(part.first - first, part.first - first + len(part.counts))
            counts[here] = map(add, counts[here], part.counts)
        return Histogram(power, first, tuple(counts), nonfinite)

    def widened(self, power: int) -> "Histogram":
        """The same values in bins of width ``3 ** power``, which is not less than the present width."""
        found = self
        while found.power < power:
            found = found.merged(3, found.power + 1)
        return found

    def merged(self, size: int, power: int | None = None) -> "Histogram":
        """Put an odd number of bins into one; with `power` None the width is told by the caller's `size`."""
        half = size // 2
        if not self.counts:
            return Histogram(self.power if power is None else power, 0, (), self.nonfinite)
        first = (self.first + half) // size
        counts = [0] * ((self.first + len(self.counts) - 1 + half) // size - first + 1)
        for index, count in enumerate(self.counts, self.first):
            counts[(index + half) // size - first] += count
        return Histogram(self.power if power is None else power, first, tuple(counts), self.nonfinite)


@dataclass(frozen=True)
class Bins:
    """Histograms on one grid for drawing.

    Attributes:
        width: of a bin.
        centers: of the bins.
        counts: for each histogram, the values in each bin.
        below: for each histogram, values below the first bin.
        above: for each histogram, values above the last bin.
    """

    width: float
    centers: tuple[float, ...]
    counts: tuple[tuple[int, ...], ...]
    below: tuple[int, ...]
    above: tuple[int, ...]


TAIL = 0.0025
"""Share of the values at either end that may be left out where they would squash all others."""


def on_one_grid(histograms: Sequence[Histogram], most: int = 61, zoom: bool = True) -> Bins:
    """Put histograms on one grid of at most `most` bins, one of which is centred on zero if it is in sight.

    With `zoom`, ends that hold next to nothing are cut off if the rest then fills eight times more of the width.

    >>> bins = on_one_grid([Histogram(0, -1, (2, 0, 1)), Histogram(0, 1, (4,))], zoom=False)
    >>> bins.centers, bins.counts
    ((-1.0, 0.0, 1.0), ((2, 0, 1), (0, 0, 4)))
    """
    filled = [histogram for histogram in histograms if histogram.counts]
    if not filled:
        nothing = (0,) * len(histograms)
        return Bins(1.0, (0.0,), ((0,),) * len(histograms), nothing, nothing)
    power = max(histogram.power for histogram in filled)
    # Bins much finer than the values are rounding, and values that are all equal need a width to be seen.
    largest = max(max(abs(one.first), abs(one.first + len(one.counts) - 1)) * one.width for one in filled)
    while 3.0**power < 1e-4 * largest or (largest == 0 and power < -3):
        power += 1
    wide = [histogram.widened(power) for histogram in histograms]
    first = min(one.first for one in wide if one.counts)
    last = max(one.first + len(one.counts) - 1 for one in wide if one.counts)
    if zoom:
        first, last = _middle(wide, first, last)
    size = -(-(last - first + 1) // most)
    size += 1 - size % 2
    drawn = [one.merged(size) for one in wide]
    low, high = (first + size // 2) // size, (last + size // 2) // size
    counts, below, above = [], [], []
    for one in drawn:
        cells = dict(enumerate(one.counts, one.first))
        counts.append(tuple(cells.get(index, 0) for index in range(low, high + 1)))
        below.append(sum(count for index, count in cells.items() if index < low))
        above.append(sum(count for index, count in cells.items() if index > high))
    width = 3.0**power * size
    centers = tuple(index * width for index in range(low, high + 1))
    return Bins(width, centers, tuple(counts), tuple(below), tuple(above))


def _middle(histograms: Sequence[Histogram], first: int, last: int) -> tuple[int, int]:
    """The narrowest range that cuts at most `TAIL` of the values at either end, if it is eight times narrower."""
    cells: dict[int, int] = {}
    for one in histograms:
        for index, count in enumerate(one.counts, one.first):
            cells[index] = cells.get(index, 0) + count
    spare = TAIL * sum(cells.values())
    low, high, seen = first, last, 0
    while seen + cells.get(low, 0) <= spare:
        seen += cells.get(low, 0)
        low += 1
    seen = 0
    while seen + cells.get(high, 0) <= spare:
        seen += cells.get(high, 0)
        high -= 1
    span = max(high - low + 1, 9)
    if span * 8 > last - first + 1:
        return first, last
    return max(first, low - span // 4), min(last, high + span // 4)


@dataclass(frozen=True)
class Band:
    """Some consecutive steps of a run.

    Attributes:
        first_step: lowest step in it.
        last_step: highest step in it.
        before: values as configured.
        after: values with the fix, or None.
        flipped: how many of them the fix gives the other sign.
    """

    first_step: int
    last_step: int
    before: Histogram
    after: Histogram | None = None
    flipped: int = 0


@dataclass(frozen=True)
class AdvantagesData:
    """Advantages of the trained rows, or of the trained tokens where they have a time axis.

    Attributes:
        unit: ``rows`` or ``tokens``.
        before: as configured.
        fix: what `after` was computed with, or None.
        after: with the fix, or None.
        flipped: advantages before, of the values whose sign the fix turns.
        changed: values that the fix changes beyond rounding.
        bands: the same by step, at most `MOST_BANDS` bands.
        logged: the same values as logged, or None.
    """

    unit: str
    before: Histogram
    fix: str | None = None
    after: Histogram | None = None
    flipped: Histogram = Histogram()
    changed: int = 0
    bands: tuple[Band, ...] = ()
    logged: Histogram | None = None


MOST_BANDS = 12


@dataclass(frozen=True)
class KlData:
    """KL from the reference, in nats; series have one entry a step, NaN where there is none.

    Attributes:
        metric: the trainer's name of the logged series.
        estimator: of the tokens.
        steps: optimiser steps.
        logged: as logged.
        recomputed: from the log-probs, by the trainer's definition of the metric.
        inverted: solved back out of a series that holds the reward.
        fix: what `after` was computed with, or None.
        after: the metric with the fix, or empty.
        tokens: per-token values of the trained tokens that carry the KL term.
        tokens_after: the same with the fix, or None.
    """

    metric: str
    estimator: str
    steps: tuple[int, ...]
    logged: tuple[float, ...]
    recomputed: tuple[float, ...]
    inverted: tuple[float, ...]
    tokens: Histogram
    fix: str | None = None
    after: tuple[float, ...] = ()
    tokens_after: Histogram | None = None


@dataclass(frozen=True)
class BaselineData:
    """How far the baseline of a group moves when only some rows vote.

    Attributes:
        fix: what the baseline is compared with.
        points: share of the group's rows without a trained token, drift of the baseline in units of reward (as
            configured minus with the fix, mean over the group's live rows), and the number of such groups.
        drift: of the groups with at least one such row.
        untouched: groups without such a row.
        undefined: groups with such a row whose drift is not defined: no live row, or a reward is unknown.
        moved: groups whose baseline drifts.
        largest: size of the largest drift.
    """

    fix: str
    points: tuple[tuple[float, float, int], ...]
    drift: Histogram
    untouched: int
    undefined: int
    moved: int = 0
    largest: float = 0.0


@dataclass(frozen=True)
class GradientData:
    """The gradient with respect to the logged log-probs, L1; one entry a step, NaN where it is not defined.

    Attributes:
        fix: what the gradient is compared with, or None.
        steps: optimiser steps.
        whole: L1 norm of the gradient.
        policy: L1 norm of the policy part.
        kl: L1 norm of the KL part.
        spurious: L1 norm of what the fix changes, over that of the gradient.
        cosine: of the angle between the gradients with and without the fix.
    """

    fix: str | None
    steps: tuple[int, ...]
    whole: tuple[float, ...]
    policy: tuple[float, ...]
    kl: tuple[float, ...]
    spurious: tuple[float, ...]
    cosine: tuple[float, ...]


@dataclass(frozen=True)
class RatioData:
    """Importance ratios of the trained tokens that carry the policy term, and how far sampler and trainer disagree.

    Attributes:
        old: the column that the policy's log-probs are compared with.
        on_policy: True if that column and the policy's log-probs are one.
        log_ratio: natural logarithm of the ratio.
        gap: `gap_of` minus the sampler's log-probs in nats, or None if the sampler's were not logged.
        gap_of: the column that the sampler's log-probs are taken from.
        clip_low: how far below one the ratio may fall.
        clip_high: how far above one it may rise.
        steps: optimiser steps.
        below: share of the step's finite ratios that are below the clip range.
        above: share of the step's finite ratios that are above it.
        outside: tokens of the run with a ratio below or above it.
        mean_gap: mean absolute gap of the step, or empty.
        fix: what the last two were computed with, or None.
        log_ratio_after: of the tokens that carry the policy term with the fix, or None.
        outside_after: share of the step's finite ratios that are outside the range with the fix, or empty.
    """

    old: str
    on_policy: bool
    log_ratio: Histogram
    gap: Histogram | None
    gap_of: str
    clip_low: float
    clip_high: float
    steps: tuple[int, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]
    outside: int = 0
    mean_gap: tuple[float, ...] = ()
    fix: str | None = None
    log_ratio_after: Histogram | None = None
    outside_after: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mark:
    """What a finding adds to a picture: a line through log-probs, or a step.

    Attributes:
        code: of the rule.
        words: what it is, short.
        slope: of the sampler's log-prob on the trainer's; None: it is no such line.
        offset: the sampler's log-prob where the trainer's is 0, in nats.
        step: the step that is marked, or None.
    """

    code: str
    words: str
    slope: float | None = None
    offset: float = 0.0
    step: int | None = None


@dataclass(frozen=True)
class Spread:
    """Sizes of gaps that have something in common.

    Attributes:
        first: lowest step, position or lag.
        last: highest.
        tokens: trained tokens to which the sampler gave less than 0.9.
        median: of their gaps, in nats; NaN of too few.
        upper: the size that nine tenths of them stay below.
    """

    first: int
    last: int
    tokens: int
    median: float
    upper: float


@dataclass(frozen=True)
class MismatchData:
    """The sampler's log-probs against the trainer's, on trained tokens.

    Attributes:
        compared: the column that the trainer's log-probs are taken from.
        low: lower end of the grid, in nats; the upper end is 0.
        counts: tokens in each cell: a row for each bin of the sampler's log-prob, from the lowest.
        tokens: tokens that were looked at.
        outside: of these, tokens outside of the grid.
        by_step: sizes of the gap by step.
        by_position: by place in the response.
        by_lag: by how many versions a row is behind the newest of its step; empty without version stamps.
        sampled: True if only some tokens of long steps were looked at.
        marks: what rules found.
    """

    compared: str
    low: float
    counts: tuple[tuple[int, ...], ...]
    tokens: int
    outside: int
    by_step: tuple[Spread, ...]
    by_position: tuple[Spread, ...]
    by_lag: tuple[Spread, ...] = ()
    sampled: bool = False
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class LengthsData:
    """How long responses are and how they end; series have one entry a step, NaN where there is none.

    Attributes:
        lengths: response tokens of all rows.
        truncated_lengths: of the rows that were cut off, or None where nothing says which.
        steps: optimiser steps.
        lower: a tenth of the step's rows are no longer than this.
        median: of the step's rows.
        upper: nine tenths are no longer.
        longest: largest length of the step.
        truncated: share of rows that were cut off: by their status, else by the largest length of the run.
        ended: share of rows whose last token is one of the end tokens, or empty.
        by_status: what `truncated` rests on: True: the column status.
        end_tokens: ids that finished rows end with, the commonest first.
        middle: median length of all rows, a length that a row has (of an even number the smaller middle one); or None.
        truncated_rows: rows that were cut off, told as in `truncated`.
        ended_rows: rows whose last token is one of the end tokens.
    """

    lengths: Histogram
    truncated_lengths: Histogram | None
    steps: tuple[int, ...]
    lower: tuple[float, ...]
    median: tuple[float, ...]
    upper: tuple[float, ...]
    longest: tuple[float, ...]
    truncated: tuple[float, ...]
    ended: tuple[float, ...] = ()
    by_status: bool = False
    end_tokens: tuple[int, ...] = ()
    middle: int | None = None
    truncated_rows: int = 0
    ended_rows: int = 0


PictureData = AdvantagesData | KlData | BaselineData | GradientData | RatioData | MismatchData | LengthsData

KINDS = ("advantages", "kl", "baseline", "gradient", "ratio", "mismatch", "lengths")


def known_kind(kind: str) -> str:
    """Return the kind.

    Raises:
        UsageError: if there is no such picture.
    """
    if kind not in KINDS:
        raise UsageError(f"no picture {kind!r} (known: {', '.join(KINDS)}){nearest(kind, KINDS)}")
    return kind


@dataclass(frozen=True)
class Gallery:
    """The pictures of a run.

    Attributes:
        drawn: kind to what it is made of.
        left_out: kind to why it cannot be made, and what would help.
    """

    drawn: dict[str, PictureData]
    left_out: dict[str, str]

"""Counts of values in bins of a power of three: those of any parts of a run add up."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

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

    @property
    def cells(self) -> Counter[int]:
        """Multiple of the width to the values around it."""
        return Counter(dict(enumerate(self.counts, self.first)))

    def __add__(self, other: "Histogram") -> "Histogram":
        nonfinite = self.nonfinite + other.nonfinite
        if not self.counts or not other.counts:
            some = self if self.counts else other
            return Histogram(some.power, some.first, some.counts, nonfinite)
        power = max(self.power, other.power)
        left, right = self.widened(power), other.widened(power)
        while (
            max(left.first + len(left.counts), right.first + len(right.counts)) - min(left.first, right.first)
            > FINE_BINS
        ):
            power += 1
            left, right = left.widened(power), right.widened(power)
        first = min(left.first, right.first)
        counts = [0] * (max(left.first + len(left.counts), right.first + len(right.counts)) - first)
        for part in (left, right):
            span = slice(part.first - first, part.first - first + len(part.counts))
            counts[span] = map(add, counts[span], part.counts)
        return Histogram(power, first, tuple(counts), nonfinite)

    def widened(self, power: int) -> "Histogram":
        """The same values in bins of width ``3 ** power``, which is not less than the present width."""
        widened = self
        while widened.power < power:
            widened = widened.merged(3, widened.power + 1)
        return widened

    def merged(self, size: int, power: int | None = None) -> "Histogram":
        """Put an odd number of bins into one; with `power` None the caller's `size` gives the width."""
        half, power = size // 2, self.power if power is None else power
        if not self.counts:
            return Histogram(power, 0, (), self.nonfinite)
        first = (self.first + half) // size
        counts = [0] * ((self.first + len(self.counts) - 1 + half) // size - first + 1)
        for place, count in enumerate(self.counts, self.first):
            counts[(place + half) // size - first] += count
        return Histogram(power, first, tuple(counts), self.nonfinite)


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
    largest = max(
        max(abs(histogram.first), abs(histogram.first + len(histogram.counts) - 1)) * histogram.width
        for histogram in filled
    )
    while 3.0**power < 1e-4 * largest or (largest == 0 and power < -3):
        power += 1
    wide = [histogram.widened(power) for histogram in histograms]
    first = min(histogram.first for histogram in wide if histogram.counts)
    last = max(histogram.first + len(histogram.counts) - 1 for histogram in wide if histogram.counts)
    if zoom:
        first, last = _middle(wide, first, last)
    size = -(-(last - first + 1) // most)
    size += 1 - size % 2
    drawn = [histogram.merged(size).cells for histogram in wide]
    places, width = range((first + size // 2) // size, (last + size // 2) // size + 1), 3.0**power * size
    return Bins(
        width,
        centers=tuple(place * width for place in places),
        counts=tuple(tuple(cells[place] for place in places) for cells in drawn),
        below=tuple(sum(count for place, count in cells.items() if place < places[0]) for cells in drawn),
        above=tuple(sum(count for place, count in cells.items() if place > places[-1]) for cells in drawn),
    )


def _middle(histograms: Sequence[Histogram], first: int, last: int) -> tuple[int, int]:
    """The narrowest range that cuts at most `TAIL` of the values at either end, if it is eight times narrower."""
    cells = sum((histogram.cells for histogram in histograms), Counter())
    spare = TAIL * cells.total()

    def end(places: range) -> int:
        cumulative = accumulate(cells[place] for place in places)
        return next(place for place, count in zip(places, cumulative, strict=True) if count > spare)

    low, high = end(range(first, last + 1)), end(range(last, first - 1, -1))
    span = max(high - low + 1, 9)
    if span * 8 > last - first + 1:
        return first, last
    return max(first, low - span // 4), min(last, high + span // 4)

"""The gap of sampler and trainer by step and by version lag, and what grows in it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from rolloutdoctor.ops.change import growth, median, rise, spearman
from rolloutdoctor.ops.tally import Sums, by_step, ratio

MOST_LAGS = 8
"""Buckets of lag in a step: the oldest rows share the last one."""

LEAST_TOKENS = 100
"""A median of fewer tokens says nothing."""


@dataclass(frozen=True)
class LagTally(Sums):
    """Sums by step and lag, under names like ``12:1``: how many versions older than the newest of its step a row is.

    Of a long run some of the steps are kept (`rolloutdoctor.ops.tally.by_step`).

    Attributes:
        rows: rows.
        tokens: trained tokens with both log-probs, among those that are looked at.
        equal: tokens of rows whose log-probs are the sampler's on every token.
        unsure: tokens to which the sampler gave less than 0.9.
        middle: median size of their gaps.
        size: sum of the sizes of the gaps of all tokens.
        k3: sum of k3, exp(delta) - 1 - delta: the KL of sampler and trainer, by the sampler's own tokens.
        weight: sum of the importance weights of trainer over sampler.
        square: sum of their squares.
        grad: sum of the absolute derivative with respect to the logged log-probs.
        newest: step to the newest version that is stamped on a row of it.
        unstamped: rows without a stamp, where others have one.
        backwards: rows whose newest version is older than their oldest.
        several: rows that several versions sampled.
        long: rows with enough unsure tokens before and after some place.
        turned: rows whose gap is much larger before some place than after it, and that are stamped with one version.
        turned_several: the same of rows stamped with several.
        turned_back: rows whose gap is much larger after some place.
    """

    rows: Mapping[str, float] = by_step()
    tokens: Mapping[str, float] = by_step()
    equal: int = 0
    unsure: Mapping[str, float] = by_step()
    middle: Mapping[str, float] = by_step(max)
    size: Mapping[str, float] = by_step()
    k3: Mapping[str, float] = by_step()
    weight: Mapping[str, float] = by_step()
    square: Mapping[str, float] = by_step()
    grad: Mapping[str, float] = by_step()
    newest: Mapping[str, float] = by_step(max)
    unstamped: int = 0
    backwards: int = 0
    several: int = 0
    long: int = 0
    turned: int = 0
    turned_several: int = 0
    turned_back: int = 0


class Cell(NamedTuple):
    """Rows of one step and lag."""

    step: int
    lag: int
    tokens: float
    middle: float | None


class Bucket(NamedTuple):
    """Rows of one lag.

    Attributes:
        lag: versions behind.
        tokens: trained tokens.
        middle: median, over steps, of the median size of the gap.
        k3: mean of k3.
        ess: effective sample size, as a share of the tokens.
        grad: their share of the absolute gradient, or None.
    """

    lag: int
    tokens: float
    middle: float | None
    k3: float
    ess: float | None
    grad: float | None


class LagTable:
    """What a tally says."""

    def __init__(self, tally: LagTally) -> None:
        """Read a tally, of a step or of a run."""
        self.tally = tally

    @cached_property
    def stamps(self) -> list[tuple[int, int]]:
        """Step and the newest version stamped in it, in the order of steps."""
        found = ((int(step), int(version)) for step, version in self.tally.newest.items())
        return sorted(found)

    @cached_property
    def counts_steps(self) -> bool:
        """True if one version is one step: lags of different steps are then counted from one origin."""
        if len(self.stamps) < 2:
            return False
        (first, low), (last, high) = self.stamps[0], self.stamps[-1]
        apart = [version - step for step, version in self.stamps]
        span = last - first
        return abs(high - low - span) <= span / 2 and max(apart) - min(apart) <= max(1, span / 2)

    @cached_property
    def behind(self) -> Mapping[int, int]:
        """Step to how far its newest version is behind the one that the run is known to have had by then."""
        if not self.counts_steps:
            return {}
        best = max(version - step for step, version in self.stamps)
        return {step: best - (version - step) for step, version in self.stamps}

    @cached_property
    def cells(self) -> list[Cell]:
        """By step and lag."""
        tally, found = self.tally, []
        for name, tokens in tally.tokens.items():
            step, lag = (int(one) for one in name.split(":"))
            some = tally.unsure.get(name, 0.0) >= LEAST_TOKENS
            middle = tally.middle.get(name) if some else None
            found.append(Cell(step, lag + self.behind.get(step, 0), tokens, middle))
        return sorted(found, key=lambda cell: cell[:2])

    @cached_property
    def by_step(self) -> list[tuple[int, float]]:
        """Step and the median size of the gap of its newest rows."""
        found: dict[int, float] = {}
        for cell in self.cells:
            if cell.middle is not None:
                found.setdefault(cell.step, cell.middle)
        return sorted(found.items())

    @cached_property
    def buckets(self) -> list[Bucket]:
        """By lag."""
        tally, total = self.tally, sum(self.tally.grad.values())
        names: dict[int, list[str]] = {}
        for name in tally.tokens:
            step, lag = (int(one) for one in name.split(":"))
            names.setdefault(lag + self.behind.get(step, 0), []).append(name)
        found = []
        for lag, some in sorted(names.items()):
            tokens, weight, square = _over(tally.tokens, some), _over(tally.weight, some), _over(tally.square, some)
            middles = [tally.middle[n] for n in some if tally.unsure.get(n, 0.0) >= LEAST_TOKENS]
            found.append(
                Bucket(
                    lag,
                    tokens,
                    median(middles) if middles else None,
                    _over(tally.k3, some) / tokens if tokens else 0.0,
                    ratio(weight**2, square * tokens),
                    _over(tally.grad, some) / total if total else None,
                )
            )
        return found

    @property
    def slope(self) -> float | None:
        """Rise of the mean of k3 with each version of lag: least squares over the buckets, weighted by their tokens."""
        tokens = math.fsum(one.tokens for one in self.buckets)
        if len(self.buckets) < 2 or not tokens:
            return None
        lag = math.fsum(one.tokens * one.lag for one in self.buckets) / tokens
        k3 = math.fsum(one.tokens * one.k3 for one in self.buckets) / tokens
        product = math.fsum(one.tokens * (one.lag - lag) * (one.k3 - k3) for one in self.buckets)
        return ratio(product, math.fsum(one.tokens * (one.lag - lag) ** 2 for one in self.buckets))

    def stale_grad(self, more_than: int) -> float | None:
        """Share of the absolute gradient on rows that are more than so many versions old."""
        known = [one.grad for one in self.buckets if one.lag > more_than and one.grad is not None]
        return math.fsum(known) if sum(self.tally.grad.values()) else None

    def onset(self, factor: float, least: float, after: int = 3) -> tuple[int, float, float] | None:
        """Step from which on the gap is so many times larger than ever before, with the medians before and after."""
        steps = self.by_step
        place = rise([size for _, size in steps], factor=factor, after=after)
        if place is None:
            return None
        low, high = (median(size for _, size in part) for part in (steps[:place], steps[place:]))
        return (steps[place][0], low, high) if high >= least else None

    def growth(self) -> tuple[float, float, float] | None:
        """The gap at the start and at the end of the run, and how its ranks go with those of the steps.

        Five steps are enough where it grows with each of them, and eight otherwise.
        """
        steps = self.by_step
        sizes = [size for _, size in steps]
        if len(sizes) >= 5 and all(one < other for one, other in pairwise(sizes)):
            return sizes[0], sizes[-1], 1.0
        ends = growth(sizes) if len(sizes) >= 8 else None
        return None if ends is None else (*ends, spearman([step for step, _ in steps], sizes) or 0.0)

    def first_update(self, factor: float, least: float) -> tuple[int, float, float] | None:
        """Second step, if the gap rises there by a factor and stays, with the medians before and after.

        None where stamps say that rows are older: that they are is known then.
        """
        steps = self.by_step
        if any(one.lag for one in self.buckets) or rise([size for _, size in steps], factor=factor, after=3) != 1:
            return None
        after = median(size for _, size in steps[1:])
        return (steps[1][0], steps[0][1], after) if after >= least else None

    def with_lag(self) -> tuple[float, int] | None:
        """How many times larger the gap is at the larger lag, and in how many places that could be compared.

        Two lags of one step are compared, so that nothing else changes; and where steps have one lag each, two
        neighbouring steps between which it falls by half of the largest or more.
        """
        by_step: dict[int, list[Cell]] = {}
        for cell in self.cells:
            if cell.middle is not None:
                by_step.setdefault(cell.step, []).append(cell)
        pairs = [(cells[0], cells[-1]) for cells in by_step.values() if len(cells) > 1]
        if len(pairs) < 3:
            most = max((cell.lag for cells in by_step.values() for cell in cells), default=0)
            lines = [cells[0] for _, cells in sorted(by_step.items())]
            pairs = [(new, old) for old, new in pairwise(lines) if old.lag - new.lag >= max(1, most / 2)]
        ratios = [(old.middle or 0.0) / max(new.middle or 0.0, 1e-4) for new, old in pairs]
        return (median(ratios), len(ratios)) if len(ratios) >= 3 else None

    def mixes_lags(self) -> bool:
        """True if rows of several lags can be compared."""
        return self.with_lag() is not None

    def beyond(self) -> list[int]:
        """Steps that hold a version from after them, where versions count steps and others are not ahead of theirs."""
        if not self.counts_steps or median(version - step for step, version in self.stamps) > 1:
            return []
        return [step for step, version in self.stamps if version > step + 1]

    def stopped(self, least: int) -> tuple[int, int] | None:
        """First step of a last stretch of one version, and its number of steps; None if it is no longer than usual.

        It counts from `least` steps on, and from four times the longest stretch before.
        """
        stretches: list[list[int]] = []
        before: int | None = None
        for step, version in self.stamps:
            if version != before:
                stretches.append([])
            stretches[-1].append(step)
            before = version
        if not stretches or len(stretches[-1]) < least:
            return None
        longest = max((len(one) for one in stretches[:-1]), default=0)
        return (stretches[-1][0], len(stretches[-1])) if len(stretches[-1]) >= 4 * longest else None


def _over(by: Mapping[str, float], names: Iterable[str]) -> float:
    return math.fsum(by.get(name, 0.0) for name in names)

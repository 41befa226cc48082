"""The gap of sampler and trainer by step and by version lag, and what grows in it."""

from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import polars as pl

from rolloutdoctor.ops.change import growth, rise, spearman

MOST_LAGS = 8
"""Buckets of lag in a step: the oldest rows share the last one."""

LEAST_TOKENS = 100
"""A median of fewer tokens says nothing."""


class Cell(NamedTuple):
    """Rows of one step and lag."""

    step: int
    lag: int
    middle: float


def counts_steps(stamps: list[tuple[int, int]]) -> bool:
    """Return True if one version is one step: lags of different steps are then counted from one origin.

    Args:
        stamps: step and the newest version stamped in it, in the order of steps.
    """
    if len(stamps) < 2:
        return False
    (first, low), (last, high) = stamps[0], stamps[-1]
    apart = [version - step for step, version in stamps]
    span = last - first
    return abs(high - low - span) <= span / 2 and max(apart) - min(apart) <= max(1, span / 2)


class LagTable:
    """Gaps between sampler and trainer, by step and lag."""

    def __init__(self, lines: pl.DataFrame) -> None:
        """Read the lines of steps and lags, in their order.

        Args:
            lines: ``step, lag, tokens, weight, square``, `middle`, the median size of the gaps, and `newest`, the
                newest version stamped in the step.
        """
        self.lines = lines
        stamped = lines.filter(pl.col("newest").is_not_null()).unique("step", maintain_order=True)
        self.stamps: list[tuple[int, int]] = stamped.select("step", "newest").rows()

    @cached_property
    def cells(self) -> list[Cell]:
        """Rows of a step and lag with enough tokens."""
        return list(map(Cell._make, self.lines.drop_nulls("middle").select("step", "lag", "middle").iter_rows()))

    @cached_property
    def by_step(self) -> list[tuple[int, float]]:
        """Step and the median size of the gap of its newest rows."""
        middles: dict[int, float] = {}
        for cell in self.cells:
            middles.setdefault(cell.step, cell.middle)
        return sorted(middles.items())

    @cached_property
    def buckets(self) -> pl.DataFrame:
        """By lag: tokens, the median over steps of the median size of the gap, and the effective sample size."""
        ess = pl.sum("weight") ** 2 / (pl.sum("square") * pl.sum("tokens"))
        some = self.lines.filter(pl.sum("tokens").over("step") > 0).sort("lag", maintain_order=True)
        return some.group_by("lag", maintain_order=True).agg(
            pl.sum("tokens"), pl.median("middle"), ess=pl.when(pl.sum("tokens") > 0).then(ess)
        )

    @property
    def has_lag(self) -> bool:
        """True if some rows are of older versions."""
        return bool((self.buckets["lag"] > 0).any())

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
        if len(sizes) >= 5 and all(left < right for left, right in pairwise(sizes)):
            return sizes[0], sizes[-1], 1.0
        ends = growth(sizes) if len(sizes) >= 8 else None
        return None if ends is None else (*ends, spearman([step for step, _ in steps], sizes) or 0.0)

    def first_update(self, factor: float, least: float) -> tuple[int, float, float] | None:
        """Second step, if the gap rises there by a factor and stays, with the medians before and after.

        None where stamps say that rows are older: that they are is known then.
        """
        steps = self.by_step
        if self.has_lag or rise([size for _, size in steps], factor=factor, after=3) != 1:
            return None
        after = median(size for _, size in steps[1:])
        return (steps[1][0], steps[0][1], after) if after >= least else None

    def with_lag(self) -> tuple[float, int] | None:
        """Return the ratio of the gap at the larger lag to that at the smaller, and the number of places compared.

        Two lags of one step are compared, so that nothing else changes; and where steps have one lag each, two
        neighbouring steps between which it falls by half of the largest or more.
        """
        by_step: dict[int, list[Cell]] = {}
        for cell in self.cells:
            by_step.setdefault(cell.step, []).append(cell)
        pairs = [(cells[0], cells[-1]) for cells in by_step.values() if len(cells) > 1]
        if len(pairs) < 3:
            most = max((cell.lag for cells in by_step.values() for cell in cells), default=0)
            lines = [cells[0] for _, cells in sorted(by_step.items())]
            pairs = [(new, old) for old, new in pairwise(lines) if old.lag - new.lag >= max(1, most / 2)]
        ratios = [old.middle / max(new.middle, 1e-4) for new, old in pairs]
        return (median(ratios), len(ratios)) if len(ratios) >= 3 else None

    def beyond(self) -> list[int]:
        """Steps that hold a version from after them, where versions count steps and others are not ahead of theirs."""
        if not counts_steps(self.stamps) or median(version - step for step, version in self.stamps) > 1:
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
        longest = max((len(stretch) for stretch in stretches[:-1]), default=0)
        return (stretches[-1][0], len(stretches[-1])) if len(stretches[-1]) >= 4 * longest else None

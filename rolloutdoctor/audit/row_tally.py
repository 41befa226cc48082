"""Compare values of rows and tokens of a step: many at once, as tensors."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rolloutdoctor.audit.tally import Lengths, QuantityTally, rounded_down
from rolloutdoctor.data.batch import RolloutBatch


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a step that some values belong to.

    Attributes:
        batch: the step.
        row_of: places of values to the numbers of their rows, ``[n]`` int64.
    """

    batch: RolloutBatch
    row_of: Callable[[Tensor], Tensor]

    def name(self, place: int) -> str:
        """Name of the row of a value."""
        return self.batch.sample_name(int(self.row_of(torch.tensor([place], device=self.batch.device))))

    def spread(self, is_off: Tensor, compared: Tensor) -> tuple[tuple[int, int], Lengths]:
        """Return the spread of disagreeing values over groups, and over rows by length; see `QuantityTally`."""
        off_n, agree_n = (self.row_of(which.nonzero().squeeze(1)) for which in (is_off, compared & ~is_off))
        ends: list[float] = []
        for rows_n in (off_n, agree_n):
            length_n = self.batch.rows.diff()[rows_n]
            ends += [float(length_n.min()), float(length_n.max())] if len(length_n) else [math.inf, -math.inf]
        groups, counts = self.batch.groups, (0, 0)
        if groups is not None and len(off_n):
            off, every = (len(torch.unique(groups.index_N[each])) for each in (off_n, torch.cat([off_n, agree_n])))
            counts = (off, every)
        return counts, (ends[0], ends[1], ends[2], ends[3])


@dataclass(frozen=True, eq=False)
class ComparedRows:
    """Many logged values of a step beside the recomputed ones; see `tally_rows`."""

    stage: str
    step: int
    values: tuple[Tensor, Tensor, Tensor]
    compared: Tensor
    doubted: Tensor
    doubt: str
    rows: Rows

    def tally(self) -> QuantityTally:
        """Compare them."""
        return tally_rows(self.stage, self.step, self.values, self.compared, self.doubted, self.doubt, self.rows)

    def points(self) -> tuple[Tensor, Tensor, Tensor]:
        """Logged and recomputed value and their difference in radii, of each value that was compared."""
        logged, recomputed, _ = self.values
        units = in_radii(*self.values)
        telling = self.compared & ~(self.doubted & (units > 1))
        return logged[telling], recomputed[telling], units[telling]


def tally_rows(
    stage: str,
    step: int,
    values: tuple[Tensor, Tensor, Tensor],
    compared: Tensor,
    doubted: Tensor,
    doubt: str,
    rows: Rows,
) -> QuantityTally:
    """Compare many values of a step.

    Args:
        stage: one of `STAGES`.
        step: optimizer step.
        values: logged and recomputed values, and their radii, ``[n]`` float64 each.
        compared: ``[n]`` bool, the values to compare.
        doubted: ``[n]`` bool, values of which a disagreement proves nothing.
        doubt: why.
        rows: which rows the values are of.
    """
    logged, recomputed, radius = values
    units = in_radii(logged, recomputed, radius)
    is_off = compared & (units > 1)
    in_doubt = is_off & doubted
    is_off, compared = is_off & ~doubted, compared & ~in_doubt
    count, off, dropped = int(compared.sum()), int(is_off.sum()), int(in_doubt.sum())
    worst = float(torch.where(compared, units, 0.0).max()) if len(units) else 0.0
    reason = doubt if dropped else ""
    # A radius of 0 is that of an exact value, such as the 0 of a zero-variance group.
    least = float(torch.where(compared & (radius > 0), radius, torch.inf).min()) if len(radius) else math.inf
    groups, lengths = rows.spread(is_off, compared)
    if not off:
        steps = int(count > 0)
        return QuantityTally(stage, count, count, worst, None, dropped, reason, steps, radius=least, lengths=lengths)
    first = int(is_off.nonzero()[0])
    its = (step, rows.name(first), float(logged[first]), float(recomputed[first]))
    tally = QuantityTally(
        stage=stage,
        compared=count,
        agree=count - off,
        worst=worst,
        first=its,
        not_compared=dropped,
        reason=reason,
        steps=1,
        steps_off=1,
        last_off=step,
        radius=least,
        line=_off_line(logged[compared], recomputed[compared]),
        groups=groups,
        lengths=lengths,
    )
    return _with_bounds(tally, logged[is_off], recomputed[is_off], radius[is_off])


def _with_bounds(tally: QuantityTally, logged: Tensor, recomputed: Tensor, radius: Tensor) -> QuantityTally:
    """Add the factors and the offsets that would explain all values that disagree, ``[n]`` float64 each."""
    gap = logged - recomputed
    bits = _bits(logged, gap.abs(), radius)
    low, high = gap - radius, gap + radius
    lower, upper = (logged - radius) / recomputed, (logged + radius) / recomputed
    factor_low, factor_high = torch.minimum(lower, upper), torch.maximum(lower, upper)
    return replace(
        tally,
        factor_low=_end(factor_low.max(), math.inf),
        factor_high=_end(factor_high.min(), -math.inf),
        offset_low=_end(low.max(), math.inf),
        offset_high=_end(high.min(), -math.inf),
        bits=rounded_down(float(bits.sum())),
        telling=int((bits > 0).sum()),
        above=(float(gap.min()), float(gap.max())),
    )


def in_radii(logged: Tensor, recomputed: Tensor, radius: Tensor) -> Tensor:
    """Differences in units of their radii, ``[n]`` float64; 0 of equal values, NaN included."""
    is_equal = (logged == recomputed) | (logged.isnan() & recomputed.isnan())
    units: Tensor = ((logged - recomputed).abs() / radius).nan_to_num(torch.inf, torch.inf)
    return torch.where(is_equal, 0.0, units)


def _off_line(logged: Tensor, recomputed: Tensor) -> float:
    """One minus R2 of a line through some values; infinite for fewer than four different ones."""
    if len(torch.unique(recomputed.float())) < 4:
        return math.inf
    y, x = logged - logged.mean(), recomputed - recomputed.mean()
    left = y - x * ((x * y).sum() / x.square().sum())
    ratio = float(left.square().sum() / y.square().sum())
    return ratio if math.isfinite(ratio) else math.inf


def _bits(logged: Tensor, gap: Tensor, radius: Tensor) -> Tensor:
    """Bits that each different logged value tells."""
    distance = torch.minimum(logged.abs(), gap)
    bits = (distance / radius).log2().nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    order = logged.argsort()
    again = torch.zeros_like(bits, dtype=torch.bool)
    again[order[1:]] = logged[order].diff() <= radius[order[1:]]
    return torch.where(again, 0.0, bits)


def _end(value: Tensor, none: float) -> float:
    number = float(value)
    return none if math.isnan(number) else number

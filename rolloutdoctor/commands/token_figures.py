"""Figure accumulators of tokens and rows alone: they need no objective, and count in the pass over the tokens."""

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from rolloutdoctor.commands.figures import FigureAccumulator, Series
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps
from rolloutdoctor.evaluation.every_nth import every_nth
from rolloutdoctor.evaluation.lag_table import LEAST_TOKENS
from rolloutdoctor.evaluation.sampler_gap import Gap, gap_of, sizes_by
from rolloutdoctor.evaluation.token_measures import TokenBlock, TokenMeasure
from rolloutdoctor.ops.elementwise import is_above
from rolloutdoctor.ops.gap_bins import BINS, bin_of, quantile
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.ops.version_stamps import lags_of
from rolloutdoctor.results.figures import LengthsData, MismatchData, Spread
from rolloutdoctor.results.histograms import Histogram

GRID_LOW, GRID_CELLS = -8.0, 96
"""The grid of log-probs: from here to 0, twelve cells to a nat."""

POSITIONS = 24
"""Places in a response are told apart by doublings: 0, 1, 2 and 3, 4 to 7, ..."""

LAGS = 8

TRUNCATED = ("length", "truncated", "max_tokens")
"""What trainers and engines call a response that was cut off at its largest length."""

_COMMONEST = 8
"""Last tokens of a step that are remembered."""


class MismatchFigure(FigureAccumulator):
    """The sampler's log-probs against the trainer's."""

    def __init__(self) -> None:
        self._grid = torch.zeros(GRID_CELLS**2 + 1, dtype=torch.int64)
        self._positions = torch.zeros(POSITIONS, BINS, dtype=torch.int64)
        self._lags = torch.zeros(LAGS, BINS, dtype=torch.int64)
        self._steps: list[Spread] = []
        self._compared, self._sampled, self._stamped = "old_log_probs", False, False

    def token_measure(self, batch: RolloutBatch) -> TokenMeasure:
        """See `FigureAccumulator`."""
        return self._measure

    def _measure(self, block: TokenBlock) -> Mapping[str, Tensor]:
        gap, batch = gap_of(block), block.batch
        if gap is None:
            return {}
        steps = len(batch.step_numbers)
        kind_N = batch.by_step.step_N * LAGS
        lag_N = lags_of(block.of_step("policy_version_min"), block.of_step("policy_version_max"), LAGS, batch.by_step)
        if lag_N is not None:
            kind_N = kind_N + lag_N
        return {
            "grid": _cells(gap)[None],
            "positions": _by_position(gap, every_nth(block).stride)[None],
            "sizes": sizes_by(gap, kind_N[block.rows], steps * LAGS).reshape(1, steps, LAGS, BINS),
            "sampled": torch.full((1,), every_nth(block).stride > 1),
        }

    def add(self, step: EvaluatedStep) -> None:
        """Add up the blocks of one step."""
        self._add(step.batch, step.token_measures)

    def add_all(self, steps: EvaluatedSteps) -> None:
        """Add up the blocks of some steps, together where they are joined."""
        if steps.batch is None:
            super().add_all(steps)
        else:
            self._add(steps.batch, steps.token_measures)

    def _add(self, batch: RolloutBatch, measures: Mapping[str, Mapping[str, Tensor]]) -> None:
        found = measures.get("mismatch")
        if not found or not len(found["grid"]):
            return
        self._grid += found["grid"].sum(0).cpu()
        self._positions += found["positions"].sum(0).cpu()
        sizes = found["sizes"].sum(0).cpu()
        self._lags += sizes.sum(0)
        self._stamped |= "policy_version_min" in batch.per_row and "policy_version_max" in batch.per_row
        self._sampled |= bool(found["sampled"].any())
        self._compared = batch.stored_name("old_log_probs") or self._compared
        of_steps = zip(batch.step_numbers, sizes.sum(1), strict=True)
        self._steps += [_spread(number, number, counts) for number, counts in of_steps]

    def data(self) -> MismatchData:
        """Return the counts."""
        rows = self._grid[:-1].reshape(GRID_CELLS, GRID_CELLS).tolist()
        return MismatchData(
            compared=self._compared,
            low=GRID_LOW,
            counts=tuple(map(tuple, rows)),
            tokens=int(self._grid.sum()),
            outside=int(self._grid[-1]),
            by_step=tuple(sorted(self._steps, key=lambda one: one.first)),
            by_position=tuple(
                _spread(2**place // 2, 2**place - 1 if place else 0, counts)
                for place, counts in enumerate(self._positions)
                if int(counts.sum())
            ),
            by_lag=tuple(_spread(lag, lag, counts) for lag, counts in enumerate(self._lags) if int(counts.sum()))
            if self._stamped
            else (),
            sampled=self._sampled,
        )


def _cells(gap: Gap) -> Tensor:
    """Count counted tokens in the cells of the grid, and last those outside, ``[GRID_CELLS ** 2 + 1]`` int64."""
    row_T, column_T = (_places(x_T) for x_T in (gap.sampler_T, gap.sampler_T + gap.delta_T))
    cell_T = torch.where((row_T | column_T) >= 0, row_T * GRID_CELLS + column_T, GRID_CELLS**2)
    # Tokens that are not counted go into a bin of their own.
    cell_T = torch.where(gap.counted_T, cell_T, GRID_CELLS**2 + 1)
    return torch.bincount(cell_T, minlength=GRID_CELLS**2 + 2)[:-1]


def _places(x_T: Tensor) -> Tensor:
    """Cells of log-probs along one side of the grid, ``[t]`` int32; -1 outside.

    Next to 0 the distance from the lower end is rounded to that of 0 itself: the last cell holds them all.
    """
    width = -GRID_LOW / GRID_CELLS
    place_T = ((x_T - GRID_LOW) / width).nan_to_num_(-1.0).clamp_(-1.0, GRID_CELLS - 1).floor_().int()
    return torch.where(is_above(x_T, 0.0), -1, place_T)


def _by_position(gap: Gap, stride: int) -> Tensor:
    """Count sizes of the gap of unsure tokens by the doubling of their place, ``[POSITIONS, BINS]`` int64."""
    runs = gap.runs
    place_T = torch.arange(len(gap.size_T), device=gap.size_T.device) - runs.expand(runs.offsets[:-1])
    # The exponent of a float32 is the doubling: 0 is below 1, which is below 2.
    doubling_T = torch.frexp((place_T * stride).float()).exponent.clamp(max=POSITIONS - 1)
    counts = torch.bincount(doubling_T * BINS + bin_of(gap.size_T), minlength=POSITIONS * BINS)
    sure = torch.bincount(doubling_T[~gap.unsure_T], minlength=POSITIONS)
    counts = counts.reshape(POSITIONS, BINS)
    counts[:, 0] -= sure
    return counts


def _spread(first: int, last: int, counts: Tensor) -> Spread:
    cells = counts.tolist()
    if sum(cells) < LEAST_TOKENS:
        return Spread(first, last, sum(cells), math.nan, math.nan)
    return Spread(first, last, sum(cells), quantile(cells, 0.5) or 0.0, quantile(cells, 0.9) or 0.0)


class LengthsFigure(FigureAccumulator):
    """How long responses are, and how they end."""

    def __init__(self) -> None:
        self._series = Series()
        self._lengths, self._truncated = Histogram(), Histogram()
        self._counts: Counter[int] = Counter()
        self._cut = 0
        self._longest_rows: dict[int, tuple[int, int]] = {}
        self._last: dict[int, Counter[int]] = {}
        self._finished: Counter[int] = Counter()
        self._rows: dict[int, int] = {}
        self._by_status = False

    def add(self, step: EvaluatedStep) -> None:
        """Count one step."""
        batch = step.batch
        length_N = batch.rows.diff()
        if not len(length_N):
            return
        sizes = length_N.double()
        self._lengths += histogram(sizes)
        self._counts.update(length_N.tolist())
        # Lengths that a row has, and not numbers between them.
        parts = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=sizes.device)
        low, middle, high = torch.quantile(sizes, parts, interpolation="lower").tolist()
        most = int(length_N.max())
        self._longest_rows[batch.step] = (most, int((length_N == most).sum()))
        self._rows[batch.step] = len(length_N)
        truncated, is_cut_N = None, length_N == most
        if batch.statuses:
            self._by_status = True
            is_cut_N = torch.tensor([status in TRUNCATED for status in batch.statuses], device=length_N.device)
            truncated = float(is_cut_N.double().mean())
            self._cut += int(is_cut_N.sum())
            self._truncated += histogram(sizes[is_cut_N])
        self._series.add(batch.step, low, middle, high, most, truncated)
        if batch.has("response_ids"):
            self._ends(batch, length_N, is_cut_N)

    def _ends(self, batch: RolloutBatch, length_N: Tensor, is_cut_N: Tensor) -> None:
        """Count the last tokens of rows, and of finished ones."""
        filled_N = length_N > 0
        last = batch.column("response_ids")[batch.rows[1:][filled_N] - 1]
        finished = last[~is_cut_N[filled_N]].tolist()
        self._last[batch.step] = Counter(dict(_first(Counter(last.tolist()))))
        self._finished.update(dict(_first(Counter(finished))))

    def data(self) -> LengthsData:
        """Return the series; end tokens are those that a tenth of the finished rows end with."""
        steps, (low, middle, high, most, truncated) = self._series.columns(5)
        if not self._by_status:
            longest = max((size for size, _ in self._longest_rows.values()), default=0)
            self._cut = self._counts[longest]
            truncated = tuple(
                rows / self._rows[step] if size == longest else 0.0
                for step, (size, rows) in sorted(self._longest_rows.items())
            )
        total = sum(self._finished.values())
        ends = tuple(token for token, count in _first(self._finished) if count >= 0.1 * total)
        ended = tuple(
            sum(self._last[step][token] for token in ends) / self._rows[step] if step in self._last else math.nan
            for step in steps
        )
        return LengthsData(
            lengths=self._lengths,
            truncated_lengths=self._truncated if self._by_status else None,
            steps=steps,
            lower=low,
            median=middle,
            upper=high,
            longest=most,
            truncated=truncated,
            ended=ended if ends else (),
            by_status=self._by_status,
            end_tokens=ends,
            middle=_median(self._counts),
            truncated_rows=self._cut,
            ended_rows=sum(counts[token] for counts in self._last.values() for token in ends),
        )


def _median(counts: "Counter[int]") -> int | None:
    """The median of counted numbers, one of them; None if there is none.

    >>> _median(Counter({2: 3, 5: 2, 9: 1})), _median(Counter())
    (2, None)
    """
    before, half = 0, (sum(counts.values()) + 1) // 2
    for number, count in sorted(counts.items()):
        before += count
        if before >= half:
            return number
    return None


def _first(counts: "Counter[int]") -> list[tuple[int, int]]:
    """The commonest, the smallest of equals first."""
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:_COMMONEST]

"""Gather how far sampler and trainer are apart: it needs no objective, and counts in the pass over the tokens."""

import math
from collections.abc import Mapping
from typing import ClassVar

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.token_measures import TokenBlock, TokenMeasure
from rolloutdoctor.ops.elementwise import is_above
from rolloutdoctor.ops.gap_bins import BINS, bin_of, quantile
from rolloutdoctor.ops.version_stamps import lags_of
from rolloutdoctor.pictures.gather.base import LINES, FigureAccumulator
from rolloutdoctor.pictures.gather.marks import MARKING
from rolloutdoctor.results.figures import MismatchData, Spread
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.measures.every_nth import every_nth
from rolloutdoctor.rules.measures.lag_table import LEAST_TOKENS
from rolloutdoctor.rules.measures.sampler_gap import Gap, gap_of, sizes_by

GRID_LOW, GRID_CELLS = -8.0, 96
"""The grid of log-probs: from here to 0, twelve cells to a nat."""

POSITIONS = 24
"""Places in a response are binned by doublings: 0, 1, 2 and 3, 4 to 7, ..."""

LAGS = 8

_SHAPES: Mapping[str, tuple[int, ...]] = {
    "grid": (GRID_CELLS**2 + 1,),
    "positions": (POSITIONS, BINS),
    "sizes": (LAGS, BINS),
}
"""Name to the shape of counts."""

_CELLS = "cells"
"""Table with the counts of a part of a run that are not 0."""

_OF_STEP = ("steps", "tokens", "median", "upper")
"""Columns of how far sampler and trainer are apart at a step."""


class MismatchFigure(FigureAccumulator):
    """The sampler's log-probs against the trainer's."""

    needs_objective = False
    marking = MARKING
    wanted = frozenset({"response_mask", "optim_step_id", "policy_version_min", "policy_version_max"})

    schemas: ClassVar[Schemas] = {
        LINES: {
            "steps": pl.Int64(),
            "tokens": pl.Int64(),
            "median": pl.Float64(),
            "upper": pl.Float64(),
            "compared": pl.String(),
            "sampled": pl.Boolean(),
            "stamped": pl.Boolean(),
        },
        _CELLS: {"name": pl.String(), "cell": pl.Int64(), "tokens": pl.Int64()},
    }

    def __init__(self) -> None:
        super().__init__()
        self._counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in _SHAPES.items()}

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        return frozenset({"old_log_probs", "rollout_log_probs"})

    def token_measures(self, batch: RolloutBatch) -> Mapping[str, TokenMeasure]:
        """See `StepConsumer`."""
        return {"mismatch": self._measure}

    def _measure(self, block: TokenBlock) -> Mapping[str, Tensor]:
        gap, rows = gap_of(block), block.batch
        if gap is None:
            return {}
        lag_N = lags_of(block.of_step("policy_version_min"), block.of_step("policy_version_max"), LAGS, rows.by_step)
        kind_N = torch.zeros_like(rows.by_step.step_N) if lag_N is None else lag_N
        return {
            "grid": _cells(gap)[None],
            "positions": _by_position(gap, every_nth(block).stride)[None],
            "sizes": sizes_by(gap, kind_N[block.rows], LAGS)[None],
            "sampled": torch.full((1,), every_nth(block).stride > 1),
        }

    def gather(self, step: EvaluatedStep) -> None:
        """Add up the blocks of one step."""
        batch, histograms = step.batch, step.token_measures.get("mismatch")
        if not histograms or not len(histograms["grid"]):
            return
        for name, counts in self._counts.items():
            counts += histograms[name].sum(0).cpu()
        spread = _spread(batch.step, batch.step, histograms["sizes"].sum((0, 1)))
        self.line(
            LINES,
            steps=batch.step,
            tokens=spread.tokens,
            median=spread.median,
            upper=spread.upper,
            compared=batch.stored_name("old_log_probs"),
            sampled=bool(histograms["sampled"].any()),
            stamped="policy_version_min" in batch.per_row and "policy_version_max" in batch.per_row,
        )

    def gathered(self) -> Gathered:
        """See `Gatherer`; of the counts, the cells that are not empty."""
        for name, counts in self._counts.items():
            cell = counts.flatten().nonzero().flatten()
            cells = {"cell": cell.numpy(), "tokens": counts.flatten()[cell].numpy()}
            self.keep(_CELLS, pl.DataFrame(cells).select(pl.lit(name).alias("name"), "cell", "tokens"))
        return super().gathered()

    def take(self, gathered: Gathered) -> None:
        """See `Gatherer`."""
        super().take(gathered)
        for (name,), cells in self.table(_CELLS).group_by("name"):
            self._counts[str(name)].view(-1).index_add_(0, cells["cell"].to_torch(), cells["tokens"].to_torch())

    def data(self) -> MismatchData:
        """Return the counts."""
        grid, positions, lags = self._counts.values()
        lines = self.table(LINES)
        compared = lines["compared"].drop_nulls()
        rows = grid[:-1].reshape(GRID_CELLS, GRID_CELLS).tolist()
        return MismatchData(
            compared="old_log_probs" if compared.is_empty() else compared[-1],
            low=GRID_LOW,
            counts=tuple(map(tuple, rows)),
            tokens=int(grid.sum()),
            outside=int(grid[-1]),
            by_step=tuple(
                Spread(step, step, tokens, median, upper)
                for step, tokens, median, upper in lines.sort("steps").select(_OF_STEP).iter_rows()
            ),
            by_position=tuple(
                _spread(2**place // 2, 2**place - 1 if place else 0, counts)
                for place, counts in enumerate(positions)
                if int(counts.sum())
            ),
            by_lag=tuple(_spread(lag, lag, counts) for lag, counts in enumerate(lags) if int(counts.sum()))
            if lines["stamped"].any()
            else (),
            sampled=lines["sampled"].any(),
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

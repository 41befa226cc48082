"""Gather the lengths of responses, and how they end: it needs no objective."""

from typing import Any, ClassVar

import polars as pl
import torch

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.pictures.gather.base import FigureAccumulator, columns_of
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import LengthsData
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.base import Context

_HAVE_LENGTHS = ("response_ids", "response_mask", "policy_log_probs", "old_log_probs", "rollout_log_probs")
"""Columns that tell the length of a response."""

NO_TOKEN = -1
"""Last token of an empty response."""


class LengthsFigure(FigureAccumulator):
    """Figure of the lengths of responses, and of how they end."""

    needs_objective = False
    wanted = frozenset({"response_ids", "status"})
    schemas: ClassVar[Schemas] = {
        "rows": {"steps": pl.Int64(), "length": pl.Int64(), "cut": pl.Boolean(), "last": pl.Int64()},
    }

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        self._tells = next((name for name in _HAVE_LENGTHS if name in context.columns), "")
        if not self._tells:
            names, advice = " or ".join(_HAVE_LENGTHS), remedy(["response_mask"], context)
            raise InputError(f"no column says how long responses are ({names}): {advice}")
        return frozenset({self._tells})

    def gather(self, step: EvaluatedStep) -> None:
        """Keep how long the rows of one step are, whether they were cut off, and their last token."""
        batch = step.batch
        if not batch.has(self._tells):
            return
        columns: dict[str, Any] = {"length": batch.rows.diff().cpu().numpy()}
        if batch.statuses:
            # Of a response without a status nothing is known.
            columns["cut"] = [None if status is None else status.lower() in TRUNCATED for status in batch.statuses]
        if batch.has("response_ids") and batch.tokens:
            last_N = batch.column("response_ids")[(batch.rows[1:] - 1).clamp(min=0)]
            columns["last"] = torch.where(batch.rows.diff() > 0, last_N, NO_TOKEN).cpu().numpy()
        self.keep("rows", pl.DataFrame(columns).with_columns(steps=pl.lit(batch.step, pl.Int64)))

    def data(self) -> LengthsData:
        """Return the series; end tokens are those that a tenth of the finished rows end with."""
        rows = self.table("rows")
        length, by_status = pl.col("length"), rows["cut"].count() > 0
        longest = pl.col("cut") if by_status else length == length.max()
        # Where no status says so, the longest of a step may have been cut off.
        is_finished = ~pl.col("cut").fill_null(length == length.max().over("steps")) & (pl.col("last") != NO_TOKEN)
        finished = rows.filter(is_finished)["last"].value_counts().sort("count", "last", descending=[True, False])
        ends = finished.filter(pl.col("count") >= 0.1 * pl.sum("count"))["last"].to_list()
        rows = rows.with_columns(cut=longest, ended=pl.col("last").is_in(ends))
        lines = rows.group_by("steps").agg(
            lower=length.quantile(0.1, "lower"),
            median=length.quantile(0.5, "lower"),
            upper=length.quantile(0.9, "lower"),
            longest=length.max().cast(pl.Float64),
            truncated=pl.mean("cut"),
            ended=pl.mean("ended"),
        )
        middle = rows["length"].quantile(0.5, "lower")
        return LengthsData(
            lengths=_counted(rows),
            truncated_lengths=_counted(rows.filter("cut")) if by_status else None,
            by_status=by_status,
            end_tokens=tuple(ends),
            middle=None if middle is None else int(middle),
            truncated_rows=int(rows["cut"].sum()),
            ended_rows=int(rows["ended"].sum()),
            **columns_of(lines if ends else lines.drop("ended")),
        )


def _counted(rows: pl.DataFrame) -> Histogram:
    """Count lengths, step by step as all histograms are."""
    each = (histogram(frame["length"].to_torch()) for _, frame in rows.group_by("steps"))
    return sum(each, Histogram())

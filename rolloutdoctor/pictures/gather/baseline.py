"""Gather how far the baseline of each group moves with a fix."""

from collections import defaultdict
from typing import ClassVar

import polars as pl

from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.row_changes import baseline_drift
from rolloutdoctor.objective.required_columns import advantage_columns, has_time_axis
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.pictures.gather.base import FigureAccumulator
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import BaselineData
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.base import Context


class BaselineFigure(FigureAccumulator):
    """Drift of each group's baseline against its share of fully masked responses."""

    default_fix = "rejected-rows"
    fix: str
    schemas: ClassVar[Schemas] = {
        "groups": {
            "step": pl.Int64(),
            "touched": pl.Boolean(),
            "share": pl.Float64(),
            "drift": pl.Float64(),
            "moved": pl.Boolean(),
        },
    }

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective = self.objectives[AS_CONFIGURED]
        if has_time_axis(objective):
            raise InputError("the estimator has no group baseline")
        if len(self.objectives) == 1:
            raise InputError("no fix that changes a baseline applies to this run; choose one with --fix")
        return advantage_columns(objective) | of_fix | {"response_mask", "group_id"}

    def gather(self, step: EvaluatedStep) -> None:
        """Keep the groups of one step."""
        before, after = step.evaluations[AS_CONFIGURED].rows, step.evaluations[self.fix].rows
        groups = step.batch.groups
        if before is None or after is None or groups is None or before.rejected_N is None:
            return
        change = baseline_drift(before, after, ~before.rejected_N)
        if change is None:
            return
        drift_N, drifted_N = change
        columns = {"group": groups.index_N, "rejected": before.rejected_N, "drift": drift_N, "moved": drifted_N}
        rows = pl.DataFrame({name: x_N.cpu().numpy() for name, x_N in columns.items()})
        by_group = rows.group_by("group", maintain_order=True).agg(
            step=pl.lit(step.batch.step, pl.Int64),
            touched=pl.any("rejected"),
            # Rounded, so that the number of distinct shares is bounded whatever the sizes of the groups.
            share=(pl.mean("rejected") * 240).round() / 240,
            drift=pl.col("drift").filter(~pl.col("rejected")).mean(),
            moved=pl.any("moved"),
        )
        self.keep("groups", by_group.drop("group"))

    def data(self) -> BaselineData:
        """Return the points and their distribution."""
        groups = self.table("groups")
        touched = groups.filter("touched")
        finite = touched.filter(pl.col("drift").is_finite())
        shares: dict[float, Histogram] = defaultdict(Histogram)
        for (_, share), frame in finite.group_by("step", "share"):
            shares[float(share)] += histogram(frame["drift"].to_torch())
        points = [
            (share, index * bins.width, count)
            for share, bins in sorted(shares.items())
            for index, count in enumerate(bins.counts, bins.first)
            if count
        ]
        drifted = finite.filter("moved")["drift"].abs().to_list()
        return BaselineData(
            self.fix,
            tuple(points),
            sum(shares.values(), Histogram()),
            untouched=len(groups) - len(touched),
            undefined=len(touched) - len(finite),
            moved=len(drifted),
            largest=max(drifted, default=0.0),
        )

"""Gather rewards by function, and how many responses of each group pass."""

from typing import Any, ClassVar

import polars as pl

from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.pictures.gather.base import FigureAccumulator, columns_of
from rolloutdoctor.results.figures import RewardsData, RewardSeries
from rolloutdoctor.rules.base import Context

WHOLE = "reward"

BANDS = 8
"""Groups of more responses are counted in bands of an eighth."""


class RewardsFigure(FigureAccumulator):
    """Rewards of responses, by function, and of their groups."""

    needs_objective = False
    wanted = frozenset({"rewards", "group_id"})
    schemas: ClassVar[Schemas] = {
        "rows": {"steps": pl.Int64(), "group": pl.Int64(), WHOLE: pl.Float64()},
    }

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        return frozenset({WHOLE})

    def gather(self, step: EvaluatedStep) -> None:
        """Keep the rewards of one step."""
        batch = step.batch
        if not batch.has(WHOLE):
            return
        columns: dict[str, Any] = {WHOLE: batch.column(WHOLE).double().cpu().numpy()}
        columns |= {f"{WHOLE}s/{name}": x_N.double().cpu().numpy() for name, x_N in batch.rewards.items()}
        if batch.groups is not None:
            columns["group"] = batch.groups.index_N.cpu().numpy()
        self.keep("rows", pl.DataFrame(columns).with_columns(steps=pl.lit(batch.step, pl.Int64)))

    def data(self) -> RewardsData:
        """Return the series; a pass is the larger of two values of the reward, else of the first function with two."""
        rows = self.table("rows")
        names = [name for name in rows.columns if name not in ("steps", "group")]
        # NaN is no reward, and above every number.
        rows = rows.with_columns(pl.when(pl.col(name).is_finite()).then(pl.col(name)).alias(name) for name in names)
        lines = rows.group_by("steps").agg(
            *(pl.col(name).mean().alias(f"mean {name}") for name in names),
            *(pl.col(name).quantile(0.1, "lower").alias(f"lower {name}") for name in names),
            *(pl.col(name).quantile(0.9, "lower").alias(f"upper {name}") for name in names),
        )
        columns = columns_of(lines)
        series = tuple(
            RewardSeries(
                name.removeprefix(f"{WHOLE}s/"), *(columns[f"{end} {name}"] for end in ("mean", "lower", "upper"))
            )
            for name in names
        )
        passing = next((name for name in names if rows[name].drop_nulls().n_unique() == 2), "")
        return RewardsData(columns["steps"], series, passing.removeprefix(f"{WHOLE}s/"), **_groups(rows, passing))


def _groups(rows: pl.DataFrame, passing: str) -> dict[str, Any]:
    """Return how many responses of each group pass, by step; nothing without a group of two responses."""
    judged = pl.col(passing or WHOLE)
    groups = (
        rows.with_columns(passed=judged == judged.max())
        .drop_nulls(["group", passing or WHOLE])
        .group_by("steps", "group")
        .agg(pl.sum("passed"), size=pl.len(), equal=pl.col(WHOLE).n_unique() == 1)
        .filter(pl.col("size") > 1)
    )
    if groups.is_empty():
        return {}
    size: int = groups.select(pl.col("size").mode().max()).item()
    bands, passed = min(size, BANDS), pl.col("passed")
    some = (passed / pl.col("size") * bands).round().clip(1, bands - 1)
    band = pl.when(passed == 0).then(0).when(passed == pl.col("size")).then(bands).otherwise(some)
    groups = groups.with_columns(band=band.cast(pl.Int64))
    by_step = groups.group_by("steps").agg(
        *((pl.col("band") == number).mean().alias(f"{number}") for number in range(bands + 1)), equal=pl.mean("equal")
    )
    # A step without such a group has its place, too.
    columns = columns_of(rows.select("steps").unique().join(by_step, on="steps", how="left"))
    counts = groups["band"].value_counts()
    at = dict(counts.iter_rows())
    return {
        "size": size,
        "shares": tuple(columns[f"{number}"] for number in range(bands + 1)) if passing else (),
        "equal": columns["equal"],
        "groups": len(groups),
        "all_fail": at.get(0, 0) if passing else 0,
        "all_pass": at.get(bands, 0) if passing else 0,
        "all_equal": int(groups["equal"].sum()),
    }

"""What the trajectories of an agent did before and after a change: errors, turns, and tool calls."""

from collections.abc import Iterator, Mapping

import polars as pl

from rolloutdoctor.commands.why.log import Windows, log_series
from rolloutdoctor.commands.why.turn_counts import ROW, failed
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.results.ledger import Compared

FROM_LOG = ("turns", "tool_calls", "tool_failures")
"""Quantities that a trainer logs of its agents."""


def compared(ready: PreparedRun, rows: pl.DataFrame, counts: pl.DataFrame, windows: Windows) -> tuple[Compared, ...]:
    """Compare what trajectories did in two windows: means over the steps of each window.

    Args:
        ready: the run, whose log is read for what it has of its own.
        rows: training rows, ``step, row, trajectory_id, status, error``; none where the run has none.
        counts: of `turn_counts`.
        windows: steps before and after.
    """
    by_name = {} if rows.is_empty() else dict(_of_rows(rows, counts, windows))
    return (*by_name.values(), *_of_log(ready, windows, by_name))


def _of_rows(rows: pl.DataFrame, counts: pl.DataFrame, windows: Windows) -> Iterator[tuple[str, Compared]]:
    alone = pl.format("row {}", "row")
    name = pl.coalesce(pl.format("{}", "trajectory_id"), alone) if "trajectory_id" in rows.columns else alone
    joined = rows.with_columns(failed=failed(), name=name).join(counts, on=ROW, how="left")
    of_trajectory = (
        pl.col("turns", "tool_turns").sum(),
        pl.col("failed").any(ignore_nulls=False),
        pl.col("derived").any(),
    )
    each = joined.group_by("step", "name").agg(*of_trajectory, known=pl.col("turns").is_not_null().any())
    inside = each.filter(pl.col("step").is_in([*windows[0], *windows[1]]))
    if rows["error"].is_not_null().any() or inside["failed"].any():
        yield from _means(inside, "failed", "errors", windows)
    if inside["known"].any():
        is_derived = bool(inside["derived"].any())
        yield from _means(inside, "tool_turns", "tool_turns", windows, is_derived=is_derived)
        yield from _means(inside, "turns", "turns", windows, is_derived=is_derived)


def _means(
    each: pl.DataFrame, column: str, name: str, windows: Windows, *, is_derived: bool = False
) -> Iterator[tuple[str, Compared]]:
    by_step = each.group_by("step").agg(value=pl.col(column).cast(pl.Float64).mean())
    before, after = (by_step.filter(pl.col("step").is_in(window))["value"].mean() for window in windows)
    if isinstance(before, float) and isinstance(after, float):
        yield name, Compared(name, before, after, "derived" if is_derived else "rows")


def _of_log(ready: PreparedRun, windows: Windows, by_name: Mapping[str, Compared]) -> Iterator[Compared]:
    for name in FROM_LOG:
        if name in by_name or name not in ready.context.quantities:
            continue
        series = _logged(ready, name)
        before, after = (series.filter(pl.col("step").is_in(window))["value"].mean() for window in windows)
        if isinstance(before, float) and isinstance(after, float):
            yield Compared(name, before, after, "log")


def _logged(ready: PreparedRun, name: str) -> pl.DataFrame:
    """Return what the log says of a quantity; a share of the calls only of steps with calls, as it is 0 without one."""
    series = log_series(ready, name)
    if name != "tool_failures" or "tool_calls" not in ready.context.quantities:
        return series
    calls = log_series(ready, "tool_calls").filter(pl.col("value") > 0)
    return series.join(calls.select("step"), on="step", how="semi", maintain_order="left")

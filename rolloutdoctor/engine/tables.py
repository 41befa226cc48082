"""Measure steps into tables; tables of parts of a run are concatenated."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import polars as pl
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch, StepKey
from rolloutdoctor.data.run_tables import EMPTY_METRICS, EMPTY_ROWS, STEP, RunTables, concatenated, steps_frame
from rolloutdoctor.evaluation.row_columns import row_column
from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of some steps, in parts; they add up by standing one after another.

    Attributes:
        rows: parts of the table `rows`.
        metrics: parts of the table `metrics`.
        unmeasured: code of a rule to the steps that it could not look at.
    """

    rows: tuple[pl.DataFrame, ...] = ()
    metrics: tuple[pl.DataFrame, ...] = ()
    unmeasured: Mapping[str, tuple[StepKey, ...]] = field(default_factory=dict)

    def __add__(self, other: "Tables") -> "Tables":
        mine, theirs = self.unmeasured, other.unmeasured
        return Tables(
            (*self.rows, *other.rows),
            (*self.metrics, *other.metrics),
            {code: (*mine.get(code, ()), *theirs.get(code, ())) for code in {**mine, **theirs}},
        )

    @cached_property
    def whole(self) -> "RunTables":
        """Both tables in one piece, sorted."""
        rows = concatenated(self.rows, EMPTY_ROWS, by=[*STEP, "row"])
        return RunTables(rows, concatenated(self.metrics, EMPTY_METRICS, by=[*STEP, "metric"]))

    def of_rule(self, code: str, splits: Collection[str], seen: Sequence[StepKey]) -> RunTables:
        """Return what a rule sees of the run.

        Args:
            code: of the rule.
            splits: that it is about.
            seen: the steps that were read.
        """
        whole = RunTables(self.whole.rows, self.whole.metrics, steps_frame(seen))
        return whole.of(splits, self.unmeasured.get(code, ()))

    def __repr__(self) -> str:
        whole = self.whole
        return f"Tables({whole.rows.to_dicts()!r}, {whole.metrics.to_dicts()!r}, {dict(self.unmeasured)!r})"


def rows_of(view: StepView, columns: Collection[str], measured: Mapping[str, Mapping[str, Tensor]]) -> pl.DataFrame:
    """Return the rows of a step, or of several, as a frame.

    Args:
        view: the steps.
        columns: of `rows` beside those that name a row; what a step does not have is null.
        measured: rule to what it measured of the rows, by name.
    """
    batch = view.batch
    split = pl.Series("split", [batch.split]).new_from_index(0, len(batch))
    series = [pl.Series("step", batch.number_N.numpy()), split, pl.Series("row", batch.row_N.cpu().numpy())]
    if batch.groups is not None:
        series.append(pl.Series("group", batch.group_N.cpu().numpy()))
    names = [*columns, *(f"{rule}/{name}" for rule, found in measured.items() for name in found)]
    series += [row_column(name, batch, view.evaluations, measured) for name in names]
    return pl.DataFrame(series).hstack(pl.concat([_names(each.batch) for each in view.each]))


def _names(batch: RolloutBatch) -> pl.DataFrame:
    """Names of rows and of their groups, and how the rows ended."""
    count = len(batch)
    groups = [None] * count
    if batch.groups is not None:
        names = [batch.group_name(group) for group in range(len(batch.groups))]
        groups = [names[group] for group in batch.groups.index_N.tolist()]
    samples = list(batch.sample_ids) or [str(row) for row in range(count)]
    columns = {"group_id": groups, "sample_id": samples, "status": list(batch.statuses) or [None] * count}
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def metrics_of(view: StepView, names: Collection[str]) -> pl.DataFrame:
    """Return logged metrics of each of some steps as a frame.

    Args:
        view: the steps.
        names: of the metrics that are wanted.
    """
    lines = [
        (*each.batch.key, name, float(value))
        for each in view.each
        for name, value in each.logged.items()
        if name in names
    ]
    return pl.DataFrame(lines, schema=EMPTY_METRICS.schema, orient="row")

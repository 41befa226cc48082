"""The table `rows` of a run: in memory or on disk, read by column and by ranges of whole steps."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from rolloutdoctor.evaluation.run_tables import EMPTY_ROWS, STEP_KEY, compact, concatenated, joined

ROW_KEY = (*STEP_KEY, "row")
"""Columns by which rows are sorted."""

RANGE_ROWS = 2**18
"""Rows that are queried at a time, about, in whole steps: 40 MB of most rules. Never of the memory that there is, or a
sum over the ranges would depend on it."""

GROUP_ROWS = 2**16
"""Rows that are written at a time, about 100 MB with all columns, and of a row group."""

_INDEX = pl.DataFrame(
    schema={"step": pl.Int64, "split": pl.String, "start": pl.Int64, "count": pl.Int64, "part": pl.Int32}
)


class RowsPart(Protocol):
    """Rows of some steps, sorted."""

    @property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, and their types."""

    @property
    def index(self) -> pl.DataFrame:
        """Where the rows of each step are, ``step, split, start, count``, in order."""

    def read(self, names: Sequence[str], rows: np.ndarray | None) -> pl.DataFrame:
        """Return some columns of these rows, ``[n]`` and rising, or of all (None); constants are stored as a value."""


def index_of(rows: pl.DataFrame) -> pl.DataFrame:
    """Return where the rows of each step are in a sorted frame, ``step, split, start, count``."""
    found = rows.select(*STEP_KEY).with_row_index("start").group_by(STEP_KEY, maintain_order=True)
    return found.agg(start=pl.first("start").cast(pl.Int64), count=pl.len().cast(pl.Int64))


@dataclass(frozen=True, eq=False)
class FramePart:
    """Rows in memory.

    Attributes:
        frame: the rows, sorted.
    """

    frame: pl.DataFrame

    @cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, and their types."""
        return self.frame.schema

    @cached_property
    def index(self) -> pl.DataFrame:
        """Where the rows of each step are."""
        return index_of(self.frame)

    def read(self, names: Sequence[str], rows: np.ndarray | None) -> pl.DataFrame:
        """Return some columns of some rows, in no memory of their own where these follow one another."""
        frame = self.frame.select(names)
        return frame if rows is None else compact(chosen(frame, rows).iter_columns())


def chosen(frame: pl.DataFrame, rows: np.ndarray) -> pl.DataFrame:
    """Return rising rows of a frame, at least one."""
    follow = int(rows[-1]) - int(rows[0]) == len(rows) - 1
    return frame.slice(int(rows[0]), len(rows)) if follow else frame[rows]


@dataclass(frozen=True, eq=False)
class RowsTable:
    """Rows of a run in parts, and which of their steps are looked at.

    Attributes:
        parts: all of them.
        index: where the rows of each step are, ``step, split, start, count, part``, sorted.
        schema: the columns of all parts, and their types: a part of which a column is null has it without one.
        columns: what a column is called to the column; None: all of them, by their own names.
    """

    parts: tuple[RowsPart, ...]
    index: pl.DataFrame
    schema: Mapping[str, pl.DataType]
    columns: Mapping[str, str] | None = None

    @classmethod
    def of(cls, parts: Sequence[RowsPart], schemas: Iterable[Mapping[str, pl.DataType]] = ()) -> "RowsTable":
        """Put parts together.

        Args:
            parts: of which no two have rows of one step.
            schemas: columns and types in the order in which the columns are to be; by default as in the parts.
        """
        each = [_INDEX, *(one.index.with_columns(part=pl.lit(place)) for place, one in enumerate(parts))]
        distinct = dict.fromkeys(tuple(one.items()) for one in (*schemas, *(part.schema for part in parts)))
        empty = pl.concat([EMPTY_ROWS, *(pl.DataFrame(schema=dict(one)) for one in distinct)], how="diagonal_relaxed")
        return cls(tuple(parts), pl.concat(each).sort(*STEP_KEY, maintain_order=True), empty.schema)

    @property
    def names(self) -> Collection[str]:
        """The columns, by their own names."""
        return self.schema

    @property
    def steps(self) -> int:
        """How many steps have rows."""
        return self.index.select(STEP_KEY).n_unique()

    def __len__(self) -> int:
        return int(self.index["count"].sum())

    def select(self, columns: Mapping[str, str]) -> "RowsTable":
        """Return some columns, those that name a row among them, under other names; one that is not there is null."""
        return replace(self, columns=columns)

    def in_splits(self, splits: Collection[str]) -> "RowsTable":
        """Return the rows of one split, or of both."""
        return replace(self, index=self.index.filter(pl.col("split").is_in(list(splits))))

    def without(self, steps: pl.DataFrame) -> "RowsTable":
        """Return the rows of all but some steps, ``step, split``."""
        return replace(self, index=self.index.join(steps, on=STEP_KEY, how="anti", maintain_order="left"))

    def frames(self, rows: int | None = None) -> Iterator[pl.DataFrame]:
        """Read the columns of ranges of whole steps, one or more, each of about so many rows: `RANGE_ROWS`."""
        bound = rows or RANGE_ROWS
        if len(self) <= bound:
            yield self.frame()
            return
        by_step = self.index.group_by("step", maintain_order=True).agg(pl.sum("count"))
        number = (pl.col("count").cum_sum() - pl.col("count")) // bound
        ranges = by_step.with_columns(number=number).group_by("number", maintain_order=True)
        for low, high in ranges.agg(low=pl.first("step"), high=pl.last("step")).select("low", "high").iter_rows():
            yield replace(self, index=self.index.filter(pl.col("step").is_between(low, high))).frame()

    def frame(self) -> pl.DataFrame:
        """Read the columns, sorted by step, split and row."""
        if self.columns is None:
            return self._read(list(self.schema))
        known = {name: full for name, full in self.columns.items() if full in self.schema}
        found = self._read(list(dict.fromkeys(known.values())))
        null = pl.lit(None, pl.Float64)
        return found.select(**{name: pl.col(known[name]) if name in known else null for name in self.columns})

    def _read(self, names: Sequence[str]) -> pl.DataFrame:
        schema = {name: self.schema[name] for name in names}
        frames = list(self._read_parts(names))
        if len(frames) == 1 and frames[0].schema == schema:
            return frames[0]
        empty = pl.DataFrame(schema=schema)
        if self.index.select(STEP_KEY).is_duplicated().any():
            return concatenated(frames, empty, by=ROW_KEY)
        # In a part steps are in order, so that only parts may lie in one another.
        return joined([empty, *frames], None if self.index["part"].is_sorted() else _places(self.index))

    def _read_parts(self, names: Sequence[str]) -> Iterator[pl.DataFrame]:
        for place, part in enumerate(self.parts):
            index = self.index.filter(part=place)
            if len(index):
                known = [name for name in names if name in part.schema]
                yield part.read(known, None if len(index) == len(part.index) else _expanded(index))


def _expanded(index: pl.DataFrame) -> np.ndarray:
    """Return the numbers of the rows of some steps, in their order."""
    start, count = index["start"].to_numpy(), index["count"].to_numpy()
    return np.repeat(start - (count.cumsum() - count), count) + np.arange(count.sum())


def _places(index: pl.DataFrame) -> pl.Series:
    """Return where the rows of each step are once the parts stand one after another."""
    placed = index.with_row_index("line").sort("part", maintain_order=True)
    placed = placed.with_columns(start=pl.col("count").cum_sum() - pl.col("count")).sort("line")
    return pl.Series(_expanded(placed))

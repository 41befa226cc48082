"""A table of a run with lines of whole steps: in memory or on disk, read by column and by ranges of steps."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, TABLES, compact, concatenated, joined

RANGE_ROWS = 2**18
"""Lines that are queried at a time, about, in whole steps: 40 MB of most rules. Never of the memory that there is, or a
sum over the ranges would depend on it."""

GROUP_ROWS = 2**16
"""Lines that are written at a time, about 100 MB of rows with all columns, and of a row group."""

_INDEX = pl.DataFrame(
    schema={"step": pl.Int64, "split": pl.String, "start": pl.Int64, "count": pl.Int64, "part": pl.Int32}
)


class TablePart(Protocol):
    """Lines of some steps, sorted."""

    @property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, and their types."""

    @property
    def index(self) -> pl.DataFrame:
        """Where the lines of each step are, ``step, split, start, count``, in order."""

    def read(self, names: Sequence[str], start: int, count: int, where: pl.Expr | None = None) -> pl.DataFrame:
        """Return some columns of lines that follow one another, all or those of which an expression is true."""


def index_of(lines: pl.DataFrame) -> pl.DataFrame:
    """Return where the lines of each step are in a sorted frame, ``step, split, start, count``."""
    grouped = lines.select(*STEP_KEY).with_row_index("start").group_by(STEP_KEY, maintain_order=True)
    return grouped.agg(start=pl.first("start").cast(pl.Int64), count=pl.len().cast(pl.Int64))


@dataclass(frozen=True, eq=False)
class FramePart:
    """Lines in memory.

    Attributes:
        frame: the lines, sorted.
    """

    frame: pl.DataFrame

    @cached_property
    def schema(self) -> Mapping[str, pl.DataType]:
        """The columns, and their types."""
        return self.frame.schema

    @cached_property
    def index(self) -> pl.DataFrame:
        """Where the lines of each step are."""
        return index_of(self.frame)

    def read(self, names: Sequence[str], start: int, count: int, where: pl.Expr | None = None) -> pl.DataFrame:
        """Return some columns of lines that follow one another; all of them in no memory of their own."""
        span = self.frame.slice(start, count)
        return (span if where is None else span.filter(where)).select(names)


@dataclass(frozen=True, eq=False)
class StepsTable:
    """A table of a run in parts, and which of its steps are looked at.

    Attributes:
        parts: all of them.
        index: where the lines of each step are, ``step, split, start, count, part``, sorted.
        schema: the columns of all parts, and their types: a part of which a column is null has it without one.
        key: the columns by which lines are sorted.
        columns: what a column is called to the column; None: all of them, by their own names.
        chosen: true of the lines that are looked at; None: of all.
    """

    parts: tuple[TablePart, ...]
    index: pl.DataFrame
    schema: Mapping[str, pl.DataType]
    key: tuple[str, ...]
    columns: Mapping[str, str] | None = None
    chosen: pl.Expr | None = None

    @classmethod
    def of(
        cls, table: str, parts: Sequence[TablePart], schemas: Iterable[Mapping[str, pl.DataType]] = ()
    ) -> "StepsTable":
        """Put parts together.

        Args:
            table: which it is, of `TABLES`.
            parts: of which no two have lines of one step, but for few.
            schemas: columns and types in the order in which the columns are to be; by default as in the parts.
        """
        each = [_INDEX, *(part.index.with_columns(part=pl.lit(place)) for place, part in enumerate(parts))]
        distinct = dict.fromkeys(tuple(schema.items()) for schema in (*schemas, *(part.schema for part in parts)))
        least, key = TABLES[table]
        empty = pl.concat([least, *(pl.DataFrame(schema=dict(schema)) for schema in distinct)], how="diagonal_relaxed")
        return cls(tuple(parts), pl.concat(each).sort(*STEP_KEY, maintain_order=True), empty.schema, key)

    @property
    def names(self) -> Collection[str]:
        """The columns, by their own names."""
        return self.schema

    @property
    def steps(self) -> int:
        """How many steps have lines."""
        return self.index.select(STEP_KEY).n_unique()

    def __len__(self) -> int:
        return int(self.index["count"].sum())

    def select(self, columns: Mapping[str, str]) -> "StepsTable":
        """Return some columns, those that name a line among them, under other names; one that is not there is null."""
        return replace(self, columns=columns)

    def where(self, chosen: pl.Expr) -> "StepsTable":
        """Return the lines of which an expression is true."""
        return replace(self, chosen=chosen if self.chosen is None else self.chosen & chosen)

    def in_splits(self, splits: Collection[str]) -> "StepsTable":
        """Return the lines of one split, or of both."""
        return replace(self, index=self.index.filter(pl.col("split").is_in(list(splits))))

    def without(self, steps: pl.DataFrame) -> "StepsTable":
        """Return the lines of all but some steps, ``step, split``."""
        return replace(self, index=self.index.join(steps, on=STEP_KEY, how="anti", maintain_order="left"))

    def frames(self, rows: int | None = None, *, block: int = 1) -> Iterator[pl.DataFrame]:
        """Read the columns of ranges of whole steps, one or more, each of about so many lines: `RANGE_ROWS`.

        Args:
            rows: lines in a range before any are left out.
            block: steps with consecutive numbers, from a multiple of theirs on, that are in one range.
        """
        bound, number = rows or RANGE_ROWS, pl.col("step") // block
        if len(self) <= bound:
            yield self.frame()
            return
        by_block = self.index.group_by(block=number, maintain_order=True).agg(pl.sum("count"))
        place = (pl.col("count").cum_sum() - pl.col("count")) // bound
        ranges = by_block.group_by(place=place, maintain_order=True).agg(low=pl.first("block"), high=pl.last("block"))
        for low, high in ranges.select("low", "high").iter_rows():
            yield replace(self, index=self.index.filter(number.is_between(low, high))).frame()

    def frame(self) -> pl.DataFrame:
        """Read the columns, sorted by step and split, and by row or name."""
        if self.columns is None:
            return self._read(list(self.schema))
        stored = {name: full for name, full in self.columns.items() if full in self.schema}
        frame = self._read(list(dict.fromkeys(stored.values())))
        null = pl.lit(None, pl.Float64)
        return frame.select(**{name: pl.col(stored[name]) if name in stored else null for name in self.columns})

    def _read(self, names: Sequence[str]) -> pl.DataFrame:
        schema = {name: self.schema[name] for name in names}
        frames = list(self._read_parts(names))
        if len(frames) == 1 and frames[0].schema == schema:
            return frames[0]
        empty = pl.DataFrame(schema=schema)
        if self.chosen is not None or self.index.select(STEP_KEY).is_duplicated().any():
            return concatenated(frames, empty, by=self.key)
        # In a part steps are in order, so that only parts may lie in one another.
        return joined([empty, *frames], None if self.index["part"].is_sorted() else _places(self.index))

    def _read_parts(self, names: Sequence[str]) -> Iterator[pl.DataFrame]:
        for place, part in enumerate(self.parts):
            index = self.index.filter(part=place)
            if not len(index):
                continue
            stored, start = [name for name in names if name in part.schema], int(index["start"][0])
            count = int(index["start"][-1] + index["count"][-1]) - start
            frame, is_all = part.read(stored, start, count, self.chosen), count == index["count"].sum()
            if not is_all and self.chosen is not None:
                frame = frame.join(index, on=STEP_KEY, how="semi", maintain_order="left")
            elif not is_all:
                frame = compact(frame[_expanded(index) - start].iter_columns())
            yield frame


def _expanded(index: pl.DataFrame) -> np.ndarray:
    """Return the numbers of the lines of some steps, in their order."""
    start, count = index["start"].to_numpy(), index["count"].to_numpy()
    return np.repeat(start - (count.cumsum() - count), count) + np.arange(count.sum())


def _places(index: pl.DataFrame) -> pl.Series:
    """Return where the lines of each step are once the parts stand one after another."""
    placed = index.with_row_index("line").sort("part", maintain_order=True)
    placed = placed.with_columns(start=pl.col("count").cum_sum() - pl.col("count")).sort("line")
    return pl.Series(_expanded(placed))

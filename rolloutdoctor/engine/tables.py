"""`Tables`: what was measured of some steps; tables of parts of a run are concatenated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.rows_on_disk import DiskPart, MemoryBound
from rolloutdoctor.engine.stored import check_columns
from rolloutdoctor.evaluation.rows_table import FramePart, RowsTable
from rolloutdoctor.evaluation.run_tables import (
    EMPTY_AUDIT,
    EMPTY_METRICS,
    EMPTY_ROWS,
    EMPTY_TURNS,
    STEP_KEY,
    RunTables,
    concatenated,
)

_FRAMES = {
    "rows": (EMPTY_ROWS, "row"),
    "metrics": (EMPTY_METRICS, "metric"),
    "audit": (EMPTY_AUDIT, "quantity"),
    "turns": (EMPTY_TURNS, "row"),
}
"""Table to an empty one, and the column by which the lines of a step are sorted."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of some steps, in parts; they add up by standing one after another.

    Attributes:
        rows: parts of the table `rows`, in memory and on disk.
        metrics: parts of the table `metrics`.
        audit: parts of how logged values compare; see `RunTables.audit`.
        unmeasured: code of a rule to the steps that it could not look at.
        turns: parts of the table `turns`.
    """

    rows: tuple[pl.DataFrame | DiskPart, ...] = ()
    metrics: tuple[pl.DataFrame, ...] = ()
    audit: tuple[pl.DataFrame, ...] = ()
    unmeasured: Mapping[str, tuple[StepKey, ...]] = field(default_factory=dict)
    turns: tuple[pl.DataFrame, ...] = ()

    def __add__(self, other: "Tables") -> "Tables":
        mine, theirs = self.unmeasured, other.unmeasured
        return Tables(
            **{name: (*getattr(self, name), *getattr(other, name)) for name in _FRAMES},
            unmeasured={code: (*mine.get(code, ()), *theirs.get(code, ())) for code in {**mine, **theirs}},
        )

    @cached_property
    def whole(self) -> "RunTables":
        """The tables in one piece each, sorted; of `rows`, what is in memory."""
        stored = [part for part in self.rows if isinstance(part, DiskPart)]
        schemas = [part.schema for part in self.rows]
        names = ("metrics", "audit", "turns")
        parts: dict[str, Iterator[pl.DataFrame]] = {name: iter(getattr(self, name)) for name in names}
        parts["rows"] = (part for part in self.rows if isinstance(part, pl.DataFrame))
        frames = {}
        for name, each in parts.items():
            empty, key = _FRAMES[name]
            # One part from then on, and nobody else holds the parts: they are as large.
            object.__setattr__(self, name, ())
            frames[name] = concatenated(each, empty, by=[*STEP_KEY, key])
            object.__setattr__(self, name, (frames[name],))
        object.__setattr__(self, "rows", (*stored, frames["rows"]))
        rows = RowsTable.of([*stored, FramePart(frames["rows"])], schemas)
        return RunTables(rows, self.metrics[0], self.audit[0], turns=self.turns[0])

    def within(self, bound: MemoryBound) -> "Tables":
        """Return the tables with their rows on disk if there are more than the bound has them.

        Raises:
            InputError: if the disk cannot take them.
        """
        frames = [part for part in self.rows if isinstance(part, pl.DataFrame)]
        if sum(frame.estimated_size() for frame in frames) <= bound.size:
            return self
        return replace(self, rows=(*(part for part in self.rows if isinstance(part, DiskPart)), bound.written(frames)))

    def with_file(self, file: str) -> "Tables":
        """Return the tables with rows that have no name of their own named after their file."""
        named = pl.col("sample_id").str.replace("^row ", f"{file}:".replace("$", "$$"))
        frames = [self.whole.rows] if self.rows else []
        rows, audit = (tuple(part.with_columns(sample_id=named) for part in each) for each in (frames, self.audit))
        return replace(self, rows=rows, audit=audit)

    @property
    def frames(self) -> dict[str, pl.DataFrame | RowsTable]:
        """The tables by name, those but `rows` in one piece; without turns there is no such table."""
        whole, rows = self.whole, self.whole.stored
        assert isinstance(rows, RowsTable)
        turns = {"turns": whole.turns} if len(whole.turns) else {}
        return {"rows": rows, "metrics": whole.metrics, "audit": whole.audit, **turns}

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "Tables":
        """Return the same with other tables.

        Raises:
            ValueError: if one lacks a column that it must have, or has one of another type.
        """
        from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS

        types = {column: known.dtype for column, known in ROW_COLUMNS.items()}
        for name, frame in frames.items():
            check_columns(name, frame, _FRAMES[name][0].schema, types if name == "rows" else {})
        return Tables(**{name: (frame,) for name, frame in frames.items()}, unmeasured=self._missed)

    def __hash__(self) -> int:
        return hash(tuple(self._missed))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tables):
            return NotImplemented
        equal = (getattr(self.whole, name).equals(getattr(other.whole, name)) for name in _FRAMES)
        return all(equal) and self._missed == other._missed

    @property
    def _missed(self) -> dict[str, tuple[StepKey, ...]]:
        return {code: tuple(sorted(keys)) for code, keys in sorted(self.unmeasured.items()) if keys}

    def __repr__(self) -> str:
        frames = (repr(getattr(self.whole, name).to_dicts()) for name in _FRAMES)
        return f"Tables({', '.join(frames)}, {self._missed!r})"

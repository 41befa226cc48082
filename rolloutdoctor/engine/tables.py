"""`Tables`: what was measured of some steps; tables of parts of a run are concatenated."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.stored import check_columns
from rolloutdoctor.engine.tables_on_disk import DiskPart, MemoryBound
from rolloutdoctor.evaluation.run_tables import TABLES, RunTables, concatenated
from rolloutdoctor.evaluation.steps_table import FramePart, StepsTable

Parts = tuple[pl.DataFrame | DiskPart, ...]


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

    rows: Parts = ()
    metrics: Parts = ()
    audit: Parts = ()
    unmeasured: Mapping[str, tuple[StepKey, ...]] = field(default_factory=dict)
    turns: Parts = ()

    def __add__(self, other: "Tables") -> "Tables":
        mine, theirs = self.unmeasured, other.unmeasured
        return Tables(
            **{name: (*getattr(self, name), *getattr(other, name)) for name in TABLES},
            unmeasured={code: (*mine.get(code, ()), *theirs.get(code, ())) for code in {**mine, **theirs}},
        )

    @cached_property
    def whole(self) -> "RunTables":
        """The tables, what is in memory in one piece each, sorted."""
        rows, metrics, audit, turns = map(self._whole, TABLES)
        return RunTables(rows, metrics, audit, turns=turns)

    def _whole(self, name: str) -> StepsTable:
        parts: Parts = getattr(self, name)
        stored, schemas = [part for part in parts if isinstance(part, DiskPart)], [part.schema for part in parts]
        frames = (part for part in parts if isinstance(part, pl.DataFrame))
        empty, key = TABLES[name]
        # One part from then on, and nobody else holds the parts: they are as large.
        object.__setattr__(self, name, ())
        del parts
        frame = concatenated(frames, empty, by=key)
        object.__setattr__(self, name, (*stored, frame))
        return StepsTable.of(name, [*stored, FramePart(frame)], schemas)

    def within(self, bound: MemoryBound) -> "Tables":
        """Return the tables with the largest of them on disk, as far as they are more than the bound has them.

        Raises:
            InputError: if the disk cannot take them.
        """
        tables: dict[str, Parts] = {name: getattr(self, name) for name in TABLES}
        frames = {name: [part for part in parts if isinstance(part, pl.DataFrame)] for name, parts in tables.items()}
        sizes = Counter(
            {name: sum(int(part.estimated_size()) for part in frame_parts) for name, frame_parts in frames.items()}
        )
        for name, size in sizes.most_common():
            if sizes.total() > bound.size and size:
                stored = (part for part in tables[name] if isinstance(part, DiskPart))
                tables[name] = (*stored, bound.written(name, frames[name]))
                del sizes[name]
        return Tables(**tables, unmeasured=self.unmeasured)

    def with_file(self, file: str) -> "Tables":
        """Return the tables with rows that have no name of their own named after their file."""
        named = pl.col("sample_id").str.replace("^row ", f"{file}:".replace("$", "$$"))
        frames = [self.whole.rows] if self.rows else []
        rows, audit = (
            tuple(frame.with_columns(sample_id=named) for frame in each) for each in (frames, [self.whole.audit])
        )
        return replace(self, rows=rows, audit=audit)

    @property
    def frames(self) -> dict[str, StepsTable]:
        """The tables by name; without turns there is no such table."""
        tables = self.whole.tables
        step_tables = {name: table for name, table in tables.items() if isinstance(table, StepsTable)}
        return {name: table for name, table in step_tables.items() if name != "turns" or len(table)}

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "Tables":
        """Return the same with other tables.

        Raises:
            ValueError: if one lacks a column that it must have, or has one of another type.
        """
        from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS

        types = {column: row_column.dtype for column, row_column in ROW_COLUMNS.items()}
        for name, frame in frames.items():
            check_columns(name, frame, TABLES[name][0].schema, types if name == "rows" else {})
        return Tables(**{name: (frame,) for name, frame in frames.items()}, unmeasured=self._missed)

    def __hash__(self) -> int:
        return hash(tuple(self._missed))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tables):
            return NotImplemented
        equal = (getattr(self.whole, name).equals(getattr(other.whole, name)) for name in TABLES)
        return all(equal) and self._missed == other._missed

    @property
    def _missed(self) -> dict[str, tuple[StepKey, ...]]:
        return {code: tuple(sorted(keys)) for code, keys in sorted(self.unmeasured.items()) if keys}

    def __repr__(self) -> str:
        frames = (repr(getattr(self.whole, name).to_dicts()) for name in TABLES)
        return f"Tables({', '.join(frames)}, {self._missed!r})"

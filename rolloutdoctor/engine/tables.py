"""`Tables`: what was measured of some steps; tables of parts of a run are concatenated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.stored import check_columns
from rolloutdoctor.evaluation.run_tables import (
    EMPTY_AUDIT,
    EMPTY_METRICS,
    EMPTY_ROWS,
    STEP_KEY,
    RunTables,
    concatenated,
)

_FRAMES = {"rows": (EMPTY_ROWS, "row"), "metrics": (EMPTY_METRICS, "metric"), "audit": (EMPTY_AUDIT, "quantity")}
"""Table to an empty one, and the column by which the lines of a step are sorted."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Tables of some steps, in parts; they add up by standing one after another.

    Attributes:
        rows: parts of the table `rows`.
        metrics: parts of the table `metrics`.
        audit: parts of how logged values compare; see `RunTables.audit`.
        unmeasured: code of a rule to the steps that it could not look at.
    """

    rows: tuple[pl.DataFrame, ...] = ()
    metrics: tuple[pl.DataFrame, ...] = ()
    audit: tuple[pl.DataFrame, ...] = ()
    unmeasured: Mapping[str, tuple[StepKey, ...]] = field(default_factory=dict)

    def __add__(self, other: "Tables") -> "Tables":
        mine, theirs = self.unmeasured, other.unmeasured
        return Tables(
            **{name: (*getattr(self, name), *getattr(other, name)) for name in _FRAMES},
            unmeasured={code: (*mine.get(code, ()), *theirs.get(code, ())) for code in {**mine, **theirs}},
        )

    @cached_property
    def whole(self) -> "RunTables":
        """The tables in one piece each, sorted."""
        for name, (empty, key) in _FRAMES.items():
            parts = iter(getattr(self, name))
            # One part from then on, and nobody else holds the parts: they are as large.
            object.__setattr__(self, name, ())
            object.__setattr__(self, name, (concatenated(parts, empty, by=[*STEP_KEY, key]),))
        return RunTables(**{name: getattr(self, name)[0] for name in _FRAMES})

    def with_file(self, file: str) -> "Tables":
        """Return the tables with rows that have no name of their own named after their file."""
        named = pl.col("sample_id").str.replace("^row ", f"{file}:".replace("$", "$$"))
        rows, audit = (tuple(part.with_columns(sample_id=named) for part in each) for each in (self.rows, self.audit))
        return replace(self, rows=rows, audit=audit)

    @property
    def frames(self) -> dict[str, pl.DataFrame]:
        """The tables in one piece each, by name."""
        return {name: getattr(self.whole, name) for name in _FRAMES}

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

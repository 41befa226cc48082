"""Tables of a run beyond a bound on memory: Parquet files in a temporary folder, of which columns are read."""

import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
import pyarrow.parquet as pq

from rolloutdoctor.evaluation.run_tables import STEP_KEY, TABLES, compact, in_order
from rolloutdoctor.evaluation.steps_table import GROUP_ROWS, FramePart, StepsTable
from rolloutdoctor.io.write.scratch import lasting_folder
from rolloutdoctor.results.errors import InputError, UsageError

_FRAMES = 64
"""Frames that are put together at a time: many with many columns take long to be taken apart."""


class DiskPart:
    """Lines in a Parquet file, which goes with the object; pickled, the file is the copy's.

    Attributes:
        schema: the columns, and their types.
        index: where the lines of each step are, ``step, split, start, count``.
    """

    def __init__(self, path: Path, table: StepsTable) -> None:
        """Write a file.

        Args:
            path: of the file.
            table: the lines.

        Raises:
            InputError: if the disk cannot take them.
        """
        start = pl.col("count").cum_sum() - pl.col("count")
        self.schema, self.index = dict(table.schema), table.index.select(*STEP_KEY, start=start, count="count")
        self._path = path
        self._removed = weakref.finalize(self, _remove, path)
        # A name of the run may mean a path among columns to Parquet.
        names = {name: str(place) for place, name in enumerate(self.schema)}
        writer: pq.ParquetWriter | None = None
        try:
            for frame in table.frames(GROUP_ROWS):
                piece = frame.rename(names).to_arrow(compat_level=pl.CompatLevel.oldest())
                writer = writer or pq.ParquetWriter(path, piece.schema, compression="lz4", write_statistics=False)
                writer.write_table(piece, row_group_size=GROUP_ROWS)
        except OSError as error:
            raise InputError(
                f"the tables of the run are larger than --memory, and {path.parent} cannot take the rest "
                f"({error.strerror or error}); give more --memory, or set TMPDIR to a folder with more space"
            ) from None
        finally:
            if writer is not None:
                writer.close()

    def read(self, names: Sequence[str], start: int, count: int, where: pl.Expr | None = None) -> pl.DataFrame:
        """Return some columns of lines that follow one another; the row groups that have them are read."""
        lines = pl.scan_parquet(self._path, glob=False).slice(start, count)
        # All columns have their names and types: what is not asked for is not read.
        lines = lines.select(pl.col(str(place)).alias(name) for place, name in enumerate(self.schema))
        lines = (lines if where is None else lines.filter(where)).select(names)
        return compact(lines.collect().cast({name: self.schema[name] for name in names}).iter_columns())

    def __getstate__(self) -> dict[str, Any]:
        # Whoever gets the copy has the file from now on.
        self._removed.detach()
        return {"schema": self.schema, "index": self.index, "path": self._path}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.schema, self.index, self._path = state["schema"], state["index"], state["path"]
        self._removed = weakref.finalize(self, _remove, self._path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


@dataclass(frozen=True)
class MemoryBound:
    """How much of the tables stays in memory, and where the rest goes.

    Attributes:
        size: bytes of lines in memory, of all tables together.
        beside: folder in which the temporary folder is made; None: that of the system.
        folder: the temporary folder, where another process has made it.
    """

    size: int = 10**9
    beside: Path | None = None
    folder: Path | None = None

    @classmethod
    def parse(cls, text: str) -> "MemoryBound":
        """Read a size: ``500MB``, ``2 GiB``, or bytes.

        Raises:
            UsageError: if it is none.

        >>> MemoryBound.parse("1.5GB").size
        1500000000
        """
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--memory {text}: no size; give one such as 500MB or 4GB")
        number, prefix, binary = match.groups()
        power = " KMGT".index((prefix or " ").upper())
        return cls(int(float(number) * (1024**power if binary else 1000**power)))

    def shared(self, parts: int) -> "MemoryBound":
        """Return the bound for one of some parts of a run, which are measured in other processes of this machine."""
        return replace(self, size=self.size // parts, folder=self._folder())

    def written(self, table: str, frames: Sequence[pl.DataFrame]) -> DiskPart:
        """Write lines of whole steps of a table to a file.

        Raises:
            InputError: if the disk cannot take them.
        """
        parts = [FramePart(in_order(frame, by=TABLES[table][1])) for frame in frames]
        return DiskPart(self._folder() / f"{uuid4().hex}.parquet", StepsTable.of(table, parts))

    def _folder(self) -> Path:
        return self.folder or lasting_folder(self.beside)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([KMGT])(i)?)?B?", re.IGNORECASE)


class TableFrames:
    """Takes frames of the tables of a run, each of whole steps; beyond a bound, the largest table goes to a file."""

    def __init__(self, bound: MemoryBound) -> None:
        self._bound, self._sizes = bound, Counter[str]()
        self._stored: dict[str, list[DiskPart]] = defaultdict(list)
        self._frames: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._small: dict[str, list[pl.DataFrame]] = defaultdict(list)

    def add(self, table: str, frame: pl.DataFrame) -> None:
        """Take lines of a table.

        Raises:
            InputError: if the disk cannot take them.
        """
        self._small[table].append(frame)
        if len(self._small[table]) == _FRAMES:
            self._put_together(table)
        self._sizes[table] += int(frame.estimated_size())
        if self._sizes.total() > self._bound.size:
            ((largest, _),) = self._sizes.most_common(1)
            self._put_together(largest)
            self._stored[largest].append(self._bound.written(largest, self._frames.pop(largest)))
            del self._sizes[largest]

    def _put_together(self, table: str) -> None:
        """Make one frame of those that wait."""
        small = self._small.pop(table, [])
        if len(small) > 1:
            joined = pl.concat(small, how="diagonal_relaxed", rechunk=True)
            small = [compact(joined.iter_columns())]
        self._frames[table] += small

    def taken(self) -> dict[str, tuple[DiskPart | pl.DataFrame, ...]]:
        """Return what was taken since the last call, by table."""
        for table in [*self._small]:
            self._put_together(table)
        tables: dict[str, tuple[DiskPart | pl.DataFrame, ...]] = {
            table: (*self._stored[table], *self._frames[table]) for table in {**self._stored, **self._frames}
        }
        for parts in (self._stored, self._frames, self._sizes):
            parts.clear()
        return tables

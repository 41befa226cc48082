"""Rows of the tables beyond a bound on memory: Parquet files in a temporary folder, of which columns are read."""

import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from rolloutdoctor.evaluation.rows_table import GROUP_ROWS, ROW_KEY, FramePart, RowsTable, chosen
from rolloutdoctor.evaluation.run_tables import STEP_KEY, compact, in_order
from rolloutdoctor.io.write.scratch import lasting_folder
from rolloutdoctor.results.errors import InputError, UsageError

_FRAMES = 64
"""Frames that are put together at a time: many with many columns take long to be taken apart."""


class DiskPart:
    """Rows in a Parquet file, which goes with the object; pickled, the file is the copy's.

    Attributes:
        schema: the columns, and their types.
        index: where the rows of each step are, ``step, split, start, count``.
    """

    def __init__(self, path: Path, table: RowsTable) -> None:
        """Write a file.

        Args:
            path: of the file.
            table: the rows.

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

    def read(self, names: Sequence[str], rows: np.ndarray | None) -> pl.DataFrame:
        """Return some columns of some rows; the row groups that have them are read."""
        places = {name: str(place) for place, name in enumerate(self.schema)}
        with pq.ParquetFile(self._path, memory_map=True) as file:
            ends = np.cumsum([file.metadata.row_group(k).num_rows for k in range(file.num_row_groups)])
            first, last = (0, len(ends) - 1) if rows is None else np.searchsorted(ends, rows[[0, -1]], side="right")
            groups = list(range(int(first), int(last) + 1))
            found = file.read_row_groups(groups, [places[name] for name in names], use_threads=False)
        frame = pl.DataFrame(pl.from_arrow(found)).select(pl.col(places[name]).alias(name) for name in names)
        if rows is not None:
            frame = chosen(frame, rows - (int(ends[first - 1]) if first else 0))
        return compact(frame.cast({name: self.schema[name] for name in names}).iter_columns())

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
        size: bytes of rows in memory; of metrics and audits, which have some lines a step, all are.
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
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"--memory {text}: no size; give one such as 500MB or 4GB")
        number, prefix, binary = found.groups()
        power = " KMGT".index((prefix or " ").upper())
        return cls(int(float(number) * (1024**power if binary else 1000**power)))

    def shared(self, parts: int) -> "MemoryBound":
        """Return the bound for one of some parts of a run, which are measured in other processes of this machine."""
        return replace(self, size=self.size // parts, folder=self._folder())

    def written(self, frames: Sequence[pl.DataFrame]) -> DiskPart:
        """Write rows of whole steps to a file.

        Raises:
            InputError: if the disk cannot take them.
        """
        parts = [FramePart(in_order(frame, by=ROW_KEY)) for frame in frames]
        return DiskPart(self._folder() / f"{uuid4().hex}.parquet", RowsTable.of(parts))

    def _folder(self) -> Path:
        return self.folder or lasting_folder(self.beside)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([KMGT])(i)?)?B?", re.IGNORECASE)


class RowFrames:
    """Takes frames of rows, each of whole steps; beyond a bound, what it has goes to a file."""

    def __init__(self, bound: MemoryBound) -> None:
        self._bound, self._size = bound, 0
        self._stored: list[DiskPart] = []
        self._frames: list[pl.DataFrame] = []
        self._small: list[pl.DataFrame] = []

    def add(self, frame: pl.DataFrame) -> None:
        """Take rows.

        Raises:
            InputError: if the disk cannot take them.
        """
        self._small.append(frame)
        if len(self._small) == _FRAMES:
            self._put_together()
        self._size += int(frame.estimated_size())
        if self._size > self._bound.size:
            self._put_together()
            self._stored.append(self._bound.written(self._frames))
            self._frames.clear()
            self._size = 0

    def _put_together(self) -> None:
        """Make one frame of those that wait."""
        if len(self._small) > 1:
            found = pl.concat(self._small, how="diagonal_relaxed", rechunk=True)
            self._frames.append(compact(found.iter_columns()))
        else:
            self._frames += self._small
        self._small.clear()

    def taken(self) -> tuple[DiskPart | pl.DataFrame, ...]:
        """Return what was taken since the last call."""
        self._put_together()
        found: tuple[DiskPart | pl.DataFrame, ...] = (*self._stored, *self._frames)
        self._stored.clear()
        self._frames.clear()
        self._size = 0
        return found

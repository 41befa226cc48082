"""Rows that are in memory as a file, so that they are read like any other."""

import os
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.io.locations.paths import IN_MEMORY, call
from rolloutdoctor.io.write.copies import copied
from rolloutdoctor.io.write.run_table import by_column
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError

NAME = IN_MEMORY


@runtime_checkable
class ArrowRows(Protocol):
    """A frame or table that hands over its columns as Arrow: of polars, pyarrow, pandas, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with a stream of batches."""


Rows = ArrowRows | Iterable[Mapping[str, object]] | Mapping[str, Sequence[object]]
"""A frame, a table, a list of records, or one sequence of cells for each column."""

_GIVE = "give a frame, a list of dicts (one for each row) or a dict of lists (one for each column)"
_NAMES = {name for column in COLUMNS for name in (column.name, *column.aliases)}


@contextmanager
def written(rows: Rows, tell: Callable[[str], None]) -> Iterator[str]:
    """Write rows as a temporary Parquet file with their metadata, removed on leaving.

    Args:
        rows: to write.
        tell: what to do with a sentence on a column that is left out: one of no known name that no file can hold.

    Raises:
        InputError: if there is no row, or no file can hold a column that is known.
    """
    table = _table(rows, tell)
    if not table.num_rows:
        raise InputError(f"{NAME}: there are none; give at least one row")
    with scratch_folder() as folder:
        path = str(folder / "rows.parquet")
        try:
            pq.write_table(table, path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{NAME}: they cannot be written as Parquet: {error}") from None
        with call(path, NAME):
            yield path


def _table(rows: Any, tell: Callable[[str], None]) -> pa.Table:  # noqa: ANN401 - whatever was given
    if isinstance(rows, Mapping):
        return _of_columns(_split_form(rows), tell)
    if type(rows).__name__ == "LazyFrame":
        rows = rows.collect()
    names = getattr(rows, "columns", None)
    try:
        table = _as_arrow(rows)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        if names is None:
            raise _not_rows(rows) from None
        table = None
    if table is not None:
        return table
    if names is None:
        return _of_records(rows, tell)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{NAME}: two columns are called {twice}; drop or rename one of them")
    return _of_columns({name: list(rows[name]) for name in names}, tell)


def _as_arrow(rows: Any) -> pa.Table | None:  # noqa: ANN401 - whatever was given
    """Convert what hands itself over as a table; None for other rows, and where the cells are Python's objects."""
    # What polars hands over by the protocol has its own kind of strings, of which Arrow takes no rows.
    if hasattr(rows, "to_arrow"):
        objects = "Object" in map(str, getattr(rows, "dtypes", ()))
        table = None if objects else rows.to_arrow()
        if table is not None and not isinstance(table, pa.Table):
            raise TypeError("a single column")
        return table
    return pa.table(rows) if isinstance(rows, ArrowRows) else None


def _split_form(columns: Mapping[str, Sequence[object]]) -> Mapping[str, Sequence[object]]:
    """Turn names and rows of cells, as in a table of W&B, into one list of cells for each name."""
    if not {"columns", "data"} <= columns.keys() or "step" in columns:
        return columns
    return dict(zip(map(str, columns["columns"]), zip(*columns["data"], strict=True), strict=True))


def _of_records(rows: Any, tell: Callable[[str], None]) -> pa.Table:  # noqa: ANN401 - whatever was given
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise _not_rows(rows)
    records = list(rows)
    if not all(isinstance(row, Mapping) for row in records):
        raise _not_rows(rows)
    return _of_columns(by_column(records), tell)


def _not_rows(rows: object) -> InputError:
    if isinstance(rows, list | tuple) and all(isinstance(each, str | os.PathLike) for each in rows):
        return InputError(f"{NAME}: these are paths; open several files as one run with rd.open(*paths)")
    return InputError(f"{NAME}: neither a frame nor a table nor a list of records, but {_kind(rows)}; {_GIVE}")


def _of_columns(columns: Mapping[str, Sequence[object]], tell: Callable[[str], None]) -> pa.Table:
    lengths = {}
    for name, cells in columns.items():
        dimensions = getattr(cells, "ndim", 1)
        if isinstance(cells, str) or not hasattr(cells, "__len__") or dimensions != 1:
            raise InputError(f"{NAME}: column {name!r} is {_kind(cells)}; {_one_for_each_row(dimensions)}")
        lengths[name] = len(cells)
    if len(set(lengths.values())) > 1:
        have = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise InputError(f"{NAME}: the columns differ in length: {have}; give one cell for each row")
    arrays = {}
    for name, cells in columns.items():
        try:
            arrays[str(name)] = _array(cells)
        except _NO_COLUMN as error:
            why = str(error) if isinstance(error, InputError) else _why_not(cells)
            if name in _NAMES:
                raise InputError(f"{NAME}: column {name!r}, {why}; give its cells one type") from None
            tell(f"{NAME}: column {name!r} is left out: {why}")
    return pa.table(arrays)


_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError, ValueError, InputError)


def _array(cells: Sequence[object]) -> pa.Array:
    try:
        array = pa.array(cells)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        array = pa.array([_number(copied(cell)) for cell in cells])
    if "struct<>" in str(array.type):
        raise InputError("row 0: a mapping without a name, which Parquet cannot hold")
    return array


def _number(cell: object) -> object:
    return cell.item() if isinstance(cell, np.ndarray) and cell.ndim == 0 else cell


def _why_not(cells: Sequence[object]) -> str:
    """Name the first cell that has no type in common with those before it, or none at all."""
    first: object = None
    at = 0
    for row, cell in enumerate(cells):
        try:
            _array([cell])
        except _NO_COLUMN:
            return f"row {row}: {_shown(cell)} where a number, a text or a list of these was expected"
        try:
            _array([first, cell])
        except _NO_COLUMN:
            return f"row {row}: {_shown(cell)} where row {at} has {_shown(first)}"
        if first is None:
            first, at = cell, row
    return "its cells have no common type"


def _shown(cell: object) -> str:
    return _kind(cell) if getattr(cell, "ndim", 0) else f"{reprlib.repr(cell):.60} ({type(cell).__name__})"


def _kind(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"one {type(value).__name__}" + ("" if shape is None else f" of shape {list(shape)}")


def _one_for_each_row(dimensions: int) -> str:
    if dimensions < 2:
        return "give one cell for each row"
    return (
        "give one list for each row, as long as its response: [row[:n] for row, n in zip(column, lengths)]; "
        "rolloutdoctor.recorders.own_loop takes padded tensors with lengths"
    )

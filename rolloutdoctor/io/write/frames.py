"""Rows that are in memory as a file, so that they are read like any other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.io.locations.paths import call
from rolloutdoctor.io.write.run_table import by_column
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError

NAME = "rows in memory"
"""How messages and results call them."""


@runtime_checkable
class ArrowRows(Protocol):
    """A frame or table that hands over its columns as Arrow: of polars, pyarrow, pandas, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule with a stream of batches."""


Rows = ArrowRows | Sequence[Mapping[str, object]]
"""A frame, a table, or a list of records."""


@contextmanager
def written(rows: Rows) -> Iterator[str]:
    """Write rows as a temporary Parquet file with their metadata, removed on leaving.

    Raises:
        InputError: if there is no row, or the cells of a column have no common type.
    """
    table = _table(rows)
    if not table.num_rows:
        raise InputError(f"{NAME}: there are none")
    with scratch_folder() as folder:
        path = str(folder / "rows.parquet")
        try:
            pq.write_table(table, path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{NAME}: they cannot be written as Parquet: {error}") from None
        with call(path, NAME):
            yield path


def _table(rows: Rows) -> pa.Table:
    # What polars hands over by the protocol has its own kind of strings, of which Arrow takes no rows.
    to_arrow = getattr(rows, "to_arrow", None)
    if to_arrow is not None:
        return to_arrow()
    return pa.table(rows) if isinstance(rows, ArrowRows) else _of_records(rows)


def _of_records(rows: Sequence[Mapping[str, object]]) -> pa.Table:
    if not all(isinstance(row, Mapping) for row in rows):
        raise InputError(f"{NAME}: neither a frame nor a table nor a list of records (mappings of columns to cells)")
    found = {}
    for name, cells in by_column(rows).items():
        try:
            found[str(name)] = pa.array(cells)
        except (pa.ArrowException, OverflowError) as error:
            raise InputError(f"{NAME}: the cells of column {name!r} have no common type: {error}") from None
    return pa.table(found)

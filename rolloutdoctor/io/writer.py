"""Writing run files and their metrics tables, bit by bit and never half."""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rolloutdoctor.errors import DataError, SchemaError, UsageError, nearest
from rolloutdoctor.io.arrow_types import arrow_type, to_arrow
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.schema import BY_NAME, COLUMNS

ROW_GROUP_BYTES = 64 * 2**20

_METRICS_SCHEMA = pa.schema(
    [("step", pa.int64()), ("split", pa.string()), ("name", pa.string()), ("value", pa.float64())]
)
_MOST_WAITING_TABLES = 256
_EMPTY_RUN = ("step", "group_id", "sample_id", "reward")

Rows = Sequence[Mapping[str, object]] | Mapping[str, Sequence[object]]


def metrics_path(run_path: str | Path) -> Path:
    """Return where the metrics table of a run file lies.

    >>> metrics_path("logs/run.parquet").as_posix()
    'logs/run.metrics.parquet'
    """
    run_path = Path(run_path)
    return run_path.with_name(f"{run_path.name.removesuffix('.parquet')}.metrics.parquet")


class _TableWriter:
    """A Parquet file that appears under its name only when it is whole.

    Rows go to a temporary file in the same directory; `close` completes and renames it, `abort` removes it.
    """

    def __init__(self, path: str | Path, metadata: RunMetadata | None, row_group_bytes: int) -> None:
        self.path = Path(path)
        self._metadata = metadata
        self._row_group_bytes = row_group_bytes
        self._schema: pa.Schema | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self.rows = 0
        # Not named *.parquet: whoever lists a directory of runs must not pick up an unfinished one.
        self._temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex[:12]}.part")
        try:
            self._file = self._temporary.open("xb")
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write there ({error.strerror}); name a writable folder") from error

    @property
    def closed(self) -> bool:
        """True after `close` or `abort`."""
        return self._file.closed

    @property
    def size(self) -> int:
        """Bytes on disk so far, plus the uncompressed bytes that wait for the next row group."""
        return (0 if self.closed else self._file.tell()) + self._waiting_bytes

    def close(self) -> None:
        """Complete the file and give it its name; does nothing the second time."""
        if self.closed:
            return
        try:
            self._flush()
            if self._parquet is None:
                self._open(self._schema or self._empty_schema())
            assert self._parquet is not None
            self._parquet.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.replace(self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; the final name is left as it was."""
        self._waiting, self._waiting_bytes = [], 0
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _append(self, table: pa.Table) -> None:
        if self.closed:
            raise UsageError(f"{self.path}: rows were written after the file was closed")
        self.rows += len(table)
        for piece in _pieces(table, self._row_group_bytes):
            if self._waiting and self._waiting_bytes + piece.nbytes > self._row_group_bytes:
                self._flush()
            self._waiting.append(piece)
            self._waiting_bytes += piece.nbytes
        if len(self._waiting) > _MOST_WAITING_TABLES:
            # Many small tables cost more in bookkeeping than in cells.
            self._waiting = [pa.concat_tables(self._waiting).combine_chunks()]

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting).combine_chunks()
        if self._parquet is None:
            self._open(table.schema)
        assert self._parquet is not None
        self._parquet.write_table(table, row_group_size=max(1, len(table)))
        self._waiting, self._waiting_bytes = [], 0

    def _open(self, schema: pa.Schema) -> None:
        if self._metadata is not None:
            schema = schema.with_metadata(self._metadata.encode())
        floats = [path for path, kind in _leaves(schema) if pa.types.is_floating(kind)]
        others = [path for path, kind in _leaves(schema) if not pa.types.is_floating(kind)]
        self._parquet = pq.ParquetWriter(
            self._file,
            schema,
            compression="zstd",
            write_page_checksum=True,
            # A column with a dictionary is not byte-stream split.
            use_dictionary=others or False,
            use_byte_stream_split=floats or False,
        )

    def _empty_schema(self) -> pa.Schema:
        return _METRICS_SCHEMA


class RunWriter(_TableWriter):
    """Writes a run file: one row for each trained response.

    The columns are those of the first `write`; later calls must bring the same ones. A file without rows is still
    a run file. As a context manager it closes on success and leaves nothing behind on an error.

    Args:
        path: final name of the file.
        metadata: who wrote it, and the options it ran with.
        row_group_bytes: largest row group, in uncompressed bytes.
    """

    def __init__(
        self, path: str | Path, metadata: RunMetadata | None = None, *, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        super().__init__(path, metadata or RunMetadata(), row_group_bytes)

    def write(self, rows: Rows) -> None:
        """Append rows: a list of records, or one sequence of cells for each column, under canonical names.

        Raises:
            SchemaError: if a column is unknown, or was not there when the first rows were written.
            DataError: if a cell does not fit its column, or the token columns of a row differ in length.
        """
        columns = _by_column(rows)
        if not columns or not len(next(iter(columns.values()))):
            return
        for name in columns:
            if name not in BY_NAME:
                raise SchemaError(f"{self.path}: no column is called {name!r}{nearest(name, list(BY_NAME))}")
        if self._schema is None:
            self._schema = pa.schema(
                [
                    (column.name, arrow_type(column, columns[column.name]))
                    for column in COLUMNS
                    if column.name in columns
                ]
            )
        elif set(columns) != set(self._schema.names):
            changed = sorted(set(columns) ^ set(self._schema.names))
            raise SchemaError(f"{self.path}: every write needs the same columns; these differ: {', '.join(changed)}")
        for field in self._schema:
            if pa.types.is_struct(field.type):
                if not field.type.num_fields:
                    raise DataError(f"{self.path}: {field.name} names nothing; leave the column out")
                self._check_names(field, columns[field.name])
        try:
            arrays = [to_arrow(BY_NAME[field.name], columns[field.name], field.type) for field in self._schema]
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from error
        counts = {name: len(array) for name, array in zip(self._schema.names, arrays, strict=True)}
        if len(set(counts.values())) != 1:
            raise DataError(f"{self.path}: the columns differ in length: {counts}")
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        self._check_lengths(table)
        self._append(table)

    def _check_names(self, field: pa.Field, cells: Sequence[object]) -> None:
        known = {field.type.field(i).name for i in range(field.type.num_fields)}
        for cell in cells:
            if isinstance(cell, Mapping) and not known.issuperset(cell):
                extra = ", ".join(sorted(str(name) for name in set(cell) - known))
                raise SchemaError(
                    f"{self.path}: {field.name} gained {extra} after the first rows were written; "
                    "give every name, null where it does not apply, from the first row on"
                )

    def _check_lengths(self, table: pa.Table) -> None:
        token_columns = [name for name in table.column_names if BY_NAME[name].per_token]
        expected: np.ndarray | None = None
        first = ""
        for name in token_columns:
            lengths = pc.fill_null(pc.list_value_length(table[name]), -1).to_numpy()
            if expected is None:
                expected, first = lengths, name
                continue
            differs = (lengths != expected) & (lengths >= 0) & (expected >= 0)
            if differs.any():
                row = int(differs.argmax())
                raise DataError(
                    f"{self.path}: row {self.rows + row}: {name} has {lengths[row]} tokens where {first} has "
                    f"{expected[row]}; token columns of one row are equally long and never padded"
                )
            expected = np.where(expected >= 0, expected, lengths)

    def _empty_schema(self) -> pa.Schema:
        return pa.schema([(name, arrow_type(BY_NAME[name])) for name in _EMPTY_RUN])


class TableWriter(_TableWriter):
    """Writes tables of one schema, step after step: results rather than runs.

    Args:
        path: final name of the file.
        metadata: who made the run that the table is about, and its options.
        schema: of every table; a file without rows has it too.
        row_group_bytes: largest row group, in uncompressed bytes.
    """

    def __init__(
        self, path: str | Path, metadata: RunMetadata, *, schema: pa.Schema, row_group_bytes: int = ROW_GROUP_BYTES
    ) -> None:
        super().__init__(path, metadata, row_group_bytes)
        self._schema = schema

    def write(self, table: pa.Table) -> None:
        """Append the rows of a table.

        Raises:
            SchemaError: if the table has another schema.
        """
        if table.schema != self._schema:
            raise SchemaError(f"{self.path}: every table needs the schema of the file")
        if len(table):
            self._append(table)


class MetricsWriter(_TableWriter):
    """Writes the table of logged metrics beside a run file.

    Args:
        path: final name of the table (see `metrics_path`).
    """

    def __init__(self, path: str | Path, *, row_group_bytes: int = ROW_GROUP_BYTES) -> None:
        super().__init__(path, None, row_group_bytes)

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Append what was logged at one step; None is a metric that had no value."""
        if values:
            count = len(values)
            columns = [[step] * count, [split] * count, list(values), list(values.values())]
            arrays = [pa.array(cells, type=kind) for cells, kind in zip(columns, _METRICS_SCHEMA.types, strict=True)]
            self._append(pa.Table.from_arrays(arrays, schema=_METRICS_SCHEMA))


def write_metrics(path: str | Path, rows: Sequence[tuple[int, str, str, float | None]]) -> None:
    """Write a whole metrics table: step, split, name and value of each logged number."""
    with MetricsWriter(path) as writer:
        for step, split, name, value in rows:
            writer.write(step, split, {name: value})


def _by_column(rows: Rows) -> dict[str, Sequence[object]]:
    if isinstance(rows, Mapping):
        return dict(rows)
    names = {name: None for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in names}


def _pieces(table: pa.Table, limit: int) -> Iterator[pa.Table]:
    """Cut a table into row ranges of at most `limit` bytes, or single rows."""
    if table.nbytes <= limit or len(table) <= 1:
        yield table
        return
    middle = len(table) // 2
    yield from _pieces(table.slice(0, middle), limit)
    yield from _pieces(table.slice(middle), limit)


def _leaves(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    """Every stored leaf: its dotted Parquet path and type."""

    def walk(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
        if pa.types.is_list(kind):
            yield from walk(f"{path}.list.element", kind.value_type)
        elif pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                yield from walk(f"{path}.{kind.field(i).name}", kind.field(i).type)
        else:
            yield path, kind

    return [leaf for field in schema for leaf in walk(field.name, field.type)]

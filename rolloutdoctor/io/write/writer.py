"""Writing run files and their metrics tables, bit by bit and never half."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.data.schema import BY_NAME
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.metadata import RunMetadata, encoded_notes
from rolloutdoctor.io.write.arrow_types import arrow_type
from rolloutdoctor.io.write.replacing import Replacement
from rolloutdoctor.io.write.run_table import Rows, by_column, run_table
from rolloutdoctor.results.errors import SchemaError, UsageError

ROW_GROUP_BYTES = 64 * 2**20

METRICS_SCHEMA = pa.schema(
    [("step", pa.int64()), ("split", pa.string()), ("name", pa.string()), ("value", pa.float64())]
)
_MOST_WAITING_TABLES = 256
_VALUES_OF_A_TABLE = 4096
_EMPTY_RUN = ("step", "group_id", "sample_id", "reward")


def metrics_path(run_path: str | Path) -> Path:
    """Return where the metrics table of a run file lies.

    >>> metrics_path("logs/run.parquet").as_posix()
    'logs/run.metrics.parquet'
    """
    run_path = Path(run_path)
    return run_path.with_name(f"{run_path.name.removesuffix('.parquet')}.metrics.parquet")


class _TableWriter:
    """A Parquet file that appears under its name only when it is whole.

    Rows go to a temporary file in the same directory; `close` completes and renames it, `abort` removes it. Whatever
    cannot be written leaves nothing behind.

    Attributes:
        notes: what a reader of a dump noted, for the metadata; to be set before the file is complete.
    """

    notes: Sequence[str] = ()

    def __init__(
        self, path: str | Path, metadata: RunMetadata | None, row_group_bytes: int, *, fresh: bool = False
    ) -> None:
        self.path = Path(path)
        self._metadata = metadata
        self._row_group_bytes = row_group_bytes
        self._schema: pa.Schema | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        self.rows = 0
        self._replacement = Replacement(Target.of(path), "a Parquet file", fresh=fresh)
        self._file = self._replacement.file

    @property
    def closed(self) -> bool:
        """True after `close` or `abort`."""
        return self._file.closed

    @property
    def size(self) -> int:
        """Bytes on disk so far, plus the uncompressed bytes that wait for the next row group."""
        return (0 if self.closed else self._file.tell()) + self._waiting_bytes

    def close(self) -> None:
        """Complete the file and give it its name; does nothing the second time.

        Raises:
            OutputError: if the file cannot be written; what had the name before still has it.
        """
        if not self.closed:
            self.complete()
            self.place()

    def complete(self) -> None:
        """Complete the file under its temporary name; `place` gives it its own."""
        with self._written():
            self._flush()
            if self._parquet is None:
                self._open(self._schema or self._empty_schema())
            assert self._parquet is not None
            if self.notes:
                self._parquet.add_key_value_metadata(encoded_notes(self.notes))
            self._parquet.close()
            self._replacement.complete()

    def place(self) -> None:
        """Give the complete file its name."""
        self._replacement.place()

    def check_free(self) -> None:
        """Insist that no file has the name.

        Raises:
            TakenError: if one has it.
        """
        self._replacement.check_free()

    def abort(self) -> None:
        """Remove what was written; the final name is left as it was. Never fails."""
        self._waiting, self._waiting_bytes = [], 0
        if self._parquet is not None:
            # It would write a footer when it is collected, and complain that there is no file.
            self._parquet.is_open = False
        self._replacement.discard()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Turn what cannot be written into one sentence, and leave nothing behind."""
        try:
            with self._replacement.explaining_errors():
                yield
        except BaseException:
            self.abort()
            raise

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
        for piece in _pieces(table, self._row_group_bytes):
            if self._waiting and self._waiting_bytes + piece.nbytes > self._row_group_bytes:
                with self._written():
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
        return METRICS_SCHEMA


class RunWriter(_TableWriter):
    """Writes a run file: one row for each trained response.

    The columns are those of the first `write`; later calls must bring the same ones. A file without rows is still
    a run file. As a context manager it closes on success and leaves nothing behind on an error.

    Args:
        path: final name of the file.
        metadata: who wrote it, and the options it ran with.
        row_group_bytes: largest row group, in uncompressed bytes.
        fresh: True to replace nothing, not even what gets the name before this file is complete.
    """

    def __init__(
        self,
        path: str | Path,
        metadata: RunMetadata | None = None,
        *,
        row_group_bytes: int = ROW_GROUP_BYTES,
        fresh: bool = False,
    ) -> None:
        super().__init__(path, metadata or RunMetadata(), row_group_bytes, fresh=fresh)

    def write(self, rows: Rows) -> None:
        """Append rows: a list of records, or one sequence of cells for each column, under canonical names.

        Raises:
            SchemaError: if a column is unknown, or was not there when the first rows were written.
            DataError: if a cell does not fit its column, or the token columns of a row differ in length.
        """
        columns = by_column(rows)
        if not columns or not len(next(iter(columns.values()))):
            return
        table = run_table(columns, self._schema, where=str(self.path), first_row=self.rows)
        self._schema = table.schema
        self.rows += len(table)
        self._append(table)

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
            self.rows += len(table)
            self._append(table)


class MetricsWriter(_TableWriter):
    """Writes the table of logged metrics beside a run file.

    Args:
        path: final name of the table (see `metrics_path`).
        fresh: as of a `RunWriter`.
    """

    def __init__(self, path: str | Path, *, row_group_bytes: int = ROW_GROUP_BYTES, fresh: bool = False) -> None:
        super().__init__(path, None, row_group_bytes, fresh=fresh)
        self._cells: list[tuple[int, str, str, float | None]] = []

    def write(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Append what was logged at one step; None is a metric that had no value."""
        self.rows += len(values)
        self._cells += [(step, split, name, value) for name, value in values.items()]
        if len(self._cells) >= _VALUES_OF_A_TABLE:
            self._append_cells()

    def write_table(self, table: pa.Table) -> None:
        """Append a table that `metrics_table` made."""
        self._append_cells()
        self.rows += len(table)
        self._append(table.cast(METRICS_SCHEMA))

    def complete(self) -> None:
        """Complete the file under its temporary name."""
        self._append_cells()
        super().complete()

    def abort(self) -> None:
        """Remove what was written."""
        self._cells = []
        super().abort()

    def _append_cells(self) -> None:
        # A table for each step of a long log costs more than its numbers.
        if self._cells:
            table, self._cells = _table_of(zip(*self._cells, strict=True)), []
            self._append(table)


def metrics_table(step: int, split: str, values: Mapping[str, float | None]) -> pa.Table:
    """Return what was logged at one step as a table; None is a metric that had no value."""
    count = len(values)
    return _table_of(([step] * count, [split] * count, list(values), list(values.values())))


def _table_of(columns: Iterable[Sequence[object]]) -> pa.Table:
    """Return a table of the columns of `METRICS_SCHEMA`."""
    arrays = [pa.array(cells, type=kind) for cells, kind in zip(columns, METRICS_SCHEMA.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=METRICS_SCHEMA)


@contextlib.contextmanager
def placed_together(run: RunWriter, metrics: MetricsWriter, *, fresh: bool = False) -> Iterator[None]:
    """Write a run file and its metrics table inside; both are complete before either gets its name.

    Args:
        run: aborted inside if there are no rows.
        metrics: aborted inside if there are none.
        fresh: True if both replace nothing. The run is first then, so that metrics are never put beside another one.
    """
    try:
        yield
        writers = [writer for writer in ((run, metrics) if fresh else (metrics, run)) if not writer.closed]
        for writer in writers:
            writer.complete()
        if fresh:
            # Both, before the first is in place: beside another's metrics a run would be read with those.
            for writer in writers:
                writer.check_free()
        for writer in writers:
            writer.place()
    except BaseException:
        for writer in (run, metrics):
            writer.abort()
        raise


def write_metrics(path: str | Path, rows: Sequence[tuple[int, str, str, float | None]]) -> None:
    """Write a whole metrics table: step, split, name and value of each logged number."""
    with MetricsWriter(path) as writer:
        for step, split, name, value in rows:
            writer.write(step, split, {name: value})


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

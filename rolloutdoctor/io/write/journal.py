"""A recording in progress: an append-only file that a killed process leaves readable up to its last whole step.

Parquet cannot be read before its footer is written, so a recorder writes this first and turns it into a run file when
it closes. A journal is a sequence of entries, one for each table that was appended: a mark, size and checksum, and an
uncompressed Arrow IPC stream. Whatever was appended before a kill is whole, and the tail of an append that was cut off
is recognised as such. Tables of logged metrics have the columns of the metrics table; a table of rows has columns of
the contract, not every one the same, which is why each is a stream with a schema of its own.

IPC itself knows no checksum: of 1,500 journals of plain streams with one byte damaged, 233 were read as other rows. So
nothing goes to Arrow but what was written.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pyarrow as pa

from rolloutdoctor.data.schema import BY_NAME, COLUMNS, Kind
from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.arrow_types import CONVERSATION, arrow_type
from rolloutdoctor.io.write.recordings import SUFFIX, append, begin, release
from rolloutdoctor.io.write.writer import METRICS_SCHEMA, MetricsWriter, RunWriter, metrics_path, placed_together
from rolloutdoctor.results.errors import InputError

_MARK = b"RDJ1"
SPLITS = (TRAIN, EVAL)
_HEAD = struct.Struct("<4sQI")
_DROPPED = b"rolloutdoctor.dropped"


@dataclass(frozen=True)
class Dropped:
    """Steps and rows that a recorder dropped because writing could not keep up.

    Attributes:
        steps: ``step`` and ``split`` of the rows that are missing.
        logs: how many times logged metrics are missing.
    """

    steps: tuple[tuple[int, str], ...] = ()
    logs: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps or self.logs)

    def __str__(self) -> str:
        return f"{len(self.steps)} steps and {self.logs} logs were dropped because writing could not keep up"

    def metadata(self) -> dict[str, object]:
        """Return what the metadata of a run file says of it; empty if nothing was dropped."""
        return {"dropped_steps": [list(step) for step in self.steps], "dropped_logs": self.logs} if self else {}


class JournalWriter:
    """Appends tables to a journal beside the run file that it will become.

    Each append goes to the operating system in one call, so that a kill of the process loses nothing that was appended
    before; it is not synchronised to the disk, which a power failure would need.

    Args:
        run_path: the run file; where it has another name than asked for is for `begin` to say. The journal gets that
            name and ``.journal``, numbered where an older one lies there.
        metadata: who makes the run, and the options.

    Attributes:
        path: of the journal.
        run_path: name that the run file will have.
        size: bytes so far.

    Raises:
        UsageError: if nothing can be written there.
    """

    def __init__(self, run_path: Path, metadata: RunMetadata) -> None:
        header = _encoded(pa.schema([]).empty_table().replace_schema_metadata(metadata.encode()))
        self._file, self.path, self.run_path = begin(run_path, header)
        self.size = len(header)

    def append(self, table: pa.Table, *, within: int | None = None) -> bool:
        """Append a table; False if the journal would grow beyond `within` bytes."""
        entry = _encoded(table)
        if within is not None and self.size + len(entry) > within:
            return False
        append(self._file, entry, self.size)
        self.size += len(entry)
        return True

    def drop(self, dropped: Dropped) -> None:
        """Note what is missing so far; the last note counts."""
        note = {_DROPPED: json.dumps([list(dropped.steps), dropped.logs]).encode()}
        self.append(pa.schema([]).empty_table().replace_schema_metadata(note))

    def close(self) -> None:
        """Stop appending; the journal stays."""
        release(self._file)


@dataclass
class Journal:
    """A journal that is read, whole or cut off.

    Attributes:
        source: the file.
        metadata: who made the run.
        schema: every column that any table of rows has.
        dropped: what the recorder dropped.
        end: bytes that are whole.
        size: bytes of the file; more than `end` if the last append was cut off.
    """

    source: Source
    metadata: RunMetadata = field(default_factory=RunMetadata)
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    dropped: Dropped = field(default_factory=Dropped)
    end: int = 0
    size: int = 0

    @classmethod
    def open(cls, source: Source) -> "Journal":
        """Look through a journal.

        Raises:
            InputError: if it cannot be read, is no journal, or holds columns that no recorder writes.
        """
        journal = cls(source)
        fields: dict[str, pa.Field] = {}
        for position, table in journal._entries():
            entries = table.schema.metadata or {}
            if not position:
                journal.metadata = RunMetadata.decode(entries, source.name)
            if _DROPPED in entries:
                journal.dropped = _dropped(entries[_DROPPED], source.name)
            if table.num_columns and table.schema != METRICS_SCHEMA:
                for each in table.schema:
                    fields[each.name] = _wider(fields.get(each.name), each, source.name)
        journal.schema = _in_order(fields)
        return journal

    def joined(self, other: "Journal") -> "Journal":
        """Return this journal with a schema that holds the rows of another one too.

        Raises:
            InputError: if a column is of one type here and of another there.
        """
        fields = {each.name: each for each in self.schema}
        for each in other.schema:
            fields[each.name] = _wider(fields.get(each.name), each, other.source.name)
        return replace(self, schema=_in_order(fields))

    def tables(self, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
        """Yield the tables of rows, each with every column of `schema`, null where it was not recorded."""
        schema = schema or self.schema
        for _, table in self._entries(logs=False):
            if table.num_columns and table.schema != METRICS_SCHEMA:
                yield pa.Table.from_arrays([_filled(table, each) for each in schema], schema=schema)

    def logs(self) -> Iterator[pa.Table]:
        """Yield the tables of logged metrics."""
        for _, table in self._entries(logs=True):
            if table.schema == METRICS_SCHEMA:
                yield table

    def _entries(self, *, logs: bool | None = None) -> Iterator[tuple[int, pa.Table]]:
        """Every whole table and where it ends in the file, 0 for the first; sets `end` and `size`.

        Once these are known, tables of rows may be passed over (`logs` is True), or those of logged metrics (False).
        """
        try:
            file = _mapped(self.source.path)
        except (OSError, ValueError) as error:
            raise InputError(f"{self.source.name}: {reason(error) if isinstance(error, OSError) else error}") from None
        with file:
            self.size, first = file.size(), True
            stop = self.size if logs is None else self.end
            while file.tell() < stop:
                try:
                    # A damaged file may declare anything: nothing is allocated here, and everything is checked.
                    table = _next_table(file, self.size)
                    if logs is not None and table.num_columns and (table.schema == METRICS_SCHEMA) is not logs:
                        continue
                    table.validate(full=True)
                    str(table.schema)  # its names have to be text
                except (pa.ArrowException, struct.error, OSError, EOFError, MemoryError, ValueError):
                    break
                position, first = 0 if first else file.tell(), False
                self.end = file.tell() if logs is None else self.end
                yield position, table
            if first:
                raise InputError(
                    f"{self.source.name}: not the journal of a recording, or cut off before anything was recorded"
                )


def _mapped(path: str) -> pa.NativeFile:
    """Map a file into memory; Arrow itself takes no name that is not UTF-8."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return pa.BufferReader(mmap(file.fileno(), 0, access=ACCESS_READ) if size else b"")


class JournalTail:
    """Reader of what is appended to a journal during recording; nothing is read twice.

    Args:
        source: the journal.

    Attributes:
        journal: what was read of it so far: metadata, schema, what was dropped, and where the next table begins.
    """

    def __init__(self, source: Source) -> None:
        self.journal = Journal(source)
        self._is_first = True

    def read(self, most: int) -> list[pa.Table]:
        """Return the whole tables that were appended since the last call, of rows and of logs, in their order.

        Args:
            most: bytes after which to stop; the rest comes with the next call.

        Raises:
            InputError: if it cannot be read, is shorter than what was read of it, or holds what no recorder writes.
        """
        journal, name = self.journal, self.journal.source.name
        try:
            file = _mapped(journal.source.path)
        except (OSError, ValueError) as error:
            raise InputError(f"{name}: {reason(error) if isinstance(error, OSError) else error}") from None
        tables: list[pa.Table] = []
        fields = {each.name: each for each in journal.schema}
        with file:
            journal.size = file.size()
            if journal.size < journal.end:
                raise InputError(
                    f"{name}: shorter than what was read of it, so that it was cut off or replaced; "
                    "follow it from its start with another --state"
                )
            file.seek(journal.end)
            begin = journal.end
            while journal.end < journal.size and journal.end - begin < most:
                try:
                    table = _next_table(file, journal.size)
                    table.validate(full=True)
                    str(table.schema)
                except (pa.ArrowException, struct.error, OSError, EOFError, MemoryError, ValueError):
                    break
                journal.end = file.tell()
                entries = table.schema.metadata or {}
                if self._is_first:
                    journal.metadata, self._is_first = RunMetadata.decode(entries, name), False
                if _DROPPED in entries:
                    journal.dropped = _dropped(entries[_DROPPED], name)
                if table.num_columns:
                    # The buffers of a table are those of the mapping: copied, they outlive it.
                    tables.append(table if table.schema == METRICS_SCHEMA else _copied(table))
                if table.num_columns and table.schema != METRICS_SCHEMA:
                    for each in table.schema:
                        fields[each.name] = _wider(fields.get(each.name), each, name)
        journal.schema = _in_order(fields)
        return tables


def _copied(table: pa.Table) -> pa.Table:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    with pa.ipc.open_stream(buffer.getvalue()) as stream:
        return stream.read_all()


def is_log(table: pa.Table) -> bool:
    """Tell a table of logged metrics from one of rows."""
    return bool(table.schema == METRICS_SCHEMA)


def filled(table: pa.Table, schema: pa.Schema) -> dict[str, pa.Array]:
    """Return every column of a schema that holds the table's own, null where it was not recorded."""
    return {each.name: _filled(table, each) for each in schema}


def _next_table(file: pa.NativeFile, size: int) -> pa.Table:
    mark, length, checksum = _HEAD.unpack(file.read(_HEAD.size))
    if mark != _MARK or length > size - file.tell():
        raise EOFError
    content = file.read_buffer(length)
    if zlib.crc32(content) != checksum:
        raise ValueError("damaged")
    for message in pa.ipc.MessageReader.open_stream(content):
        if message.type not in ("schema", "record batch") or _is_compressed(message.metadata.to_pybytes()):
            # Nobody records that, and a few bytes of it take all memory.
            raise ValueError("compressed")
    with pa.ipc.open_stream(content) as stream:
        table = pa.Table.from_batches(list(stream), stream.schema)
    if table.schema == METRICS_SCHEMA and (
        any(column.null_count for column in table.columns[:3])
        or not set(table["split"].unique().to_pylist()) <= set(SPLITS)
        or (len(table) and min(table["step"].to_pylist()) < 0)
    ):
        raise ValueError("no log of a recorder")
    return table


def _is_compressed(message: bytes) -> bool:
    """Tell a record batch whose buffers are compressed: field 3 of the table in field 2 (Message.fbs, Arrow)."""

    def field(table: int, number: int) -> int:
        slots = table - struct.unpack_from("<i", message, table)[0]
        size = struct.unpack_from("<H", message, slots)[0]
        offset = struct.unpack_from("<H", message, slots + 4 + 2 * number)[0] if size >= 6 + 2 * number else 0
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", message)[0], 2)
    return header > 0 and field(header + struct.unpack_from("<I", message, header)[0], 3) > 0


def finish(journal_path: Path, run_path: Path, recording: Mapping[str, object] | None = None) -> int:
    """Turn a journal into a run file with its metrics table; both appear whole, and replace nothing.

    Args:
        journal_path: a journal that nobody writes to any more; it stays.
        run_path: final name of the run file. A journal without rows or without logs leaves no such file.
        recording: what the recorder says of its work at the end, for the metadata.

    Returns:
        How many rows there are.

    Raises:
        TakenError: if the run file or its metrics table is there.
        InputError, UsageError, OSError: if something cannot be read or written.
    """
    journal = Journal.open(Source.of(str(journal_path)))
    metadata = replace(
        journal.metadata, recording={**journal.metadata.recording, **journal.dropped.metadata(), **(recording or {})}
    )
    run, metrics = RunWriter(run_path, metadata, fresh=True), MetricsWriter(metrics_path(run_path), fresh=True)
    with placed_together(run, metrics, fresh=True):
        for table in journal.tables():
            run.write({name: table[name] for name in table.column_names})
        for table in journal.logs():
            metrics.write_table(table)
        for writer in (run, metrics):
            if not writer.rows:
                writer.abort()
    return run.rows


def is_journal(path: Path) -> bool:
    """Tell a journal by its name and its first bytes."""
    if not path.is_file() or not path.name.endswith(SUFFIX):
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


def _encoded(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, table.schema) as stream:
        stream.write_table(table)
    content: bytes = buffer.getvalue().to_pybytes()
    return _HEAD.pack(_MARK, len(content), zlib.crc32(content)) + content


def _dropped(raw: bytes, name: str) -> Dropped:
    try:
        steps, logs = json.loads(raw)
        if not all(type(step) is int and split in SPLITS for step, split in steps) or type(logs) is not int:
            raise TypeError
        return Dropped(tuple((step, split) for step, split in steps), logs)
    except (ValueError, TypeError, RecursionError):
        raise InputError(f"{name}: the note of what was dropped is damaged; the journal cannot be trusted") from None


def _in_order(fields: Mapping[str, pa.Field]) -> pa.Schema:
    return pa.schema([fields[column.name] for column in COLUMNS if column.name in fields])


def _wider(before: pa.Field | None, field: pa.Field, name: str) -> pa.Field:
    """The field that holds both; of rewards, every name that either has."""
    column = BY_NAME.get(field.name)
    kind = None if column is None else _expected(column.kind, field.type, arrow_type(column))
    if kind is None:
        raise InputError(f"{name}: the column {field.name!r} of type {field.type} is none that a recorder writes")
    if before is None or before.type == field.type:
        return pa.field(field.name, field.type)
    if not pa.types.is_struct(field.type):
        raise InputError(f"{name}: the column {field.name!r} is {before.type} in one step and {field.type} in another")
    names = dict.fromkeys(each.type.field(i).name for each in (before, field) for i in range(each.type.num_fields))
    return pa.field(field.name, pa.struct([(each, pa.float64()) for each in names]))


def _expected(kind: Kind, stored: pa.DataType, usual: pa.DataType) -> pa.DataType | None:
    if kind is Kind.NAMED_NUMBERS:
        members = range(stored.num_fields) if pa.types.is_struct(stored) else ()
        numbers = [pa.types.is_float64(stored.field(i).type) for i in members]
        return stored if numbers and all(numbers) else None
    if kind is Kind.MESSAGES and stored == CONVERSATION:
        return stored
    return stored if stored == usual else None


def _filled(table: pa.Table, wanted: pa.Field) -> pa.Array:
    if wanted.name not in table.column_names:
        return pa.nulls(len(table), wanted.type)
    column = table[wanted.name].combine_chunks()
    if column.type == wanted.type:
        return column
    members = {column.type.field(i).name: column.field(i) for i in range(column.type.num_fields)}
    return pa.StructArray.from_arrays(
        [members.get(each.name, pa.nulls(len(table), each.type)) for each in wanted.type], fields=list(wanted.type)
    )

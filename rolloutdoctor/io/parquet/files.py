"""One Parquet file of a run: its footer, its row groups, and the conversion of pyarrow's errors to ours."""

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.data.schema import COLUMNS, TEXTS
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.locations.stores import address_of, open_bytes, size_of
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.parquet.columns import NO_ALIASES, StoredColumn, TrainerAliases, resolve
from rolloutdoctor.io.parquet.footer import Chunk, read_chunks
from rolloutdoctor.io.parquet.pages import check_chunk
from rolloutdoctor.io.parquet.size_guard import check_declared, damaged
from rolloutdoctor.results.errors import InputError, RolloutDoctorError

_MAGIC = b"PAR1"
_ENCRYPTED_MAGIC = b"PARE"
_BUFFER_BYTES = 2**18
"""Of each column read at a time."""

_LEAST_ROWS = 32
"""Of a slice: a footer may claim more values than there are."""

_MOST_ROWS = 2**12
"""Of a slice: of rows of few tokens, what is kept of each is more than its tokens."""


@dataclass(frozen=True)
class RunFile:
    """Footer of a run file. Nothing is held open; plain data, it can be sent to another process.

    Attributes:
        source: what to open, and its name in messages.
        footer: pyarrow's FileMetaData.
        columns: canonical name to the column that gives it.
        metadata: who wrote it.
        chunks: what the footer says of each column chunk, read without pyarrow: asked for a damaged one, that aborts
            the process.
        seen: size in bytes and time of the last change in nanoseconds, when the footer was read; None: a remote file.
    """

    source: Source
    footer: pq.FileMetaData
    columns: dict[str, StoredColumn]
    metadata: RunMetadata
    chunks: list[list[Chunk]]
    seen: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """Return the name of the file for messages."""
        return self.source.name

    @property
    def rows(self) -> int:
        """Number of rows, from the footer."""
        return int(self.footer.num_rows)

    def row_group_rows(self) -> list[int]:
        """Rows of every row group, from the footer."""
        return [int(self.footer.row_group(group).num_rows) for group in range(self.footer.num_row_groups)]

    def stamp(self) -> str:
        """Return what distinguishes the file from others, and from itself before it was written again."""
        identity = (self.source.path, self.seen, self.rows, self.footer.serialized_size, self.chunks)
        return hashlib.sha256(repr(identity).encode()).hexdigest()

    def check_unchanged(self) -> None:
        """Insist on the file that the footer was read from.

        Raises:
            InputError: if it has gone, or was written again.
        """
        if self.seen is None:
            return
        try:
            looks = _looks(self.source)
        except OSError as error:
            raise InputError(
                f"{self.name}: {reason(error)}; every worker has to see the file under the path {self.source.path}"
            ) from None
        if looks != self.seen:
            raise InputError(f"{self.name}: the file changed after its footer was read; start again when it is whole")

    @cached_property
    def leaves(self) -> dict[str, list[int]]:
        """Stored column to the numbers of its leaves."""
        schema = self.footer.schema
        leaves: dict[str, list[int]] = {}
        for leaf in range(len(schema)):
            leaves.setdefault(schema.column(leaf).path.split(".")[0], []).append(leaf)
        return leaves

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns of the file that mean nothing here, under the names that they have in it."""
        names = {alias for column in COLUMNS for alias in (column.name, *column.aliases)}
        names |= {column.stored for column in self.columns.values()}
        return tuple(name for name in self.leaves if name not in names)

    @contextmanager
    def opened(self) -> Iterator["OpenFile"]:
        """Open the file for reading row groups; it is closed on leaving.

        Raises:
            InputError: if it cannot be opened.
        """
        with open_parquet(self.source, self.footer) as parquet:
            yield OpenFile(self, parquet)


@dataclass(frozen=True)
class OpenFile:
    """A run file while it is open.

    Attributes:
        file: what its footer says.
        parquet: to read it with.
        sound: row groups and leaves whose pages hold what the footer says.
    """

    file: RunFile
    parquet: pq.ParquetFile
    sound: set[tuple[int, int]] = field(default_factory=set)

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Decode canonical `columns` of one row group, under their canonical names; those it lacks are left out.

        Args:
            group: number of the row group.
            columns: canonical names.

        Raises:
            InputError: if the row group is damaged.
        """
        stored = self._stored([group], columns)
        with reading(self.file.name, f"row group {group}"):
            table = _renamed(self.parquet.read_row_group(group, columns=_once(stored)), stored)
        self._check_rows(group, table.num_rows, self.file.footer.row_group(group).num_rows)
        return table

    def slices(self, groups: Sequence[int], columns: Sequence[str], values: int) -> Iterator[pa.Table]:
        """Decode the same as `read`, of row groups that follow each other, some rows at a time.

        What a decoder needs beside the rows is small, as they are.

        Args:
            groups: numbers of the row groups; several of them are small.
            columns: canonical names, one at least.
            values: how many a slice has of the longest list column, about.

        Raises:
            InputError: if a row group is damaged.
        """
        stored = self._stored(groups, columns)
        declared = sum(int(self.file.footer.row_group(group).num_rows) for group in groups)
        rows_read = 0
        try:
            with reading(self.file.name, f"row group {groups[0]}"):
                rows = self._rows_of(groups, declared, _once(stored), values)
                for batch in self.parquet.iter_batches(rows, row_groups=list(groups), columns=_once(stored)):
                    rows_read += batch.num_rows
                    yield _renamed(pa.Table.from_batches([batch]), stored)
                    del batch
            self._check_rows(groups[0], rows_read, declared)
        except InputError:
            # Read one by one, they tell which it is.
            for group in groups if len(groups) > 1 else ():
                self.read(group, columns)
            raise

    def _stored(self, groups: Sequence[int], columns: Sequence[str]) -> dict[str, str]:
        """Canonical to stored names of those columns that the file has, none of them too large."""
        stored = {name: self.file.columns[name].stored for name in columns if name in self.file.columns}
        texts = [each for name, each in stored.items() if name in TEXTS]
        if texts:
            _check_declared(self.file.source, self.file.footer, texts, self.file.chunks, groups)
        leaves = [leaf for name in _once(stored) for leaf in self.file.leaves.get(name, ())]
        wanted = [(group, leaf) for group in groups for leaf in leaves if (group, leaf) not in self.sound]
        check_pages(self.file.source, self.file.footer, self.file.chunks, wanted)
        self.sound.update(wanted)
        return stored

    def _rows_of(self, groups: Sequence[int], rows: int, stored: Collection[str], values: int) -> int:
        """Rows of a slice that has about so many values of the longest column."""
        chunks, leaves = self.file.chunks, self.file.leaves
        read = [leaf for name in stored for leaf in leaves.get(name, ())]
        most = max((sum(chunks[group][leaf].values for group in groups) for leaf in read), default=0)
        return max(_LEAST_ROWS, min(_MOST_ROWS, -(-rows // max(1, round(most / values)))))

    def _check_rows(self, group: int, rows: int, declared: int) -> None:
        if rows != declared:
            raise InputError(
                f"{self.file.name}: row group {group} has {rows} rows where its footer says {declared}; "
                "the file is damaged, write or copy it again"
            ) from None


def _renamed(table: pa.Table, stored: Mapping[str, str]) -> pa.Table:
    # Columns are picked by name: a prefix such as "kl" also fetches a column called "kl.x".
    return table.select(list(stored.values())).rename_columns(list(stored))


def _once(stored: Mapping[str, str]) -> list[str]:
    """Names under which columns are stored; one may be two columns of the contract."""
    return list(dict.fromkeys(stored.values()))


def read_footer(source: Source, trainer: str | None, aliases: TrainerAliases = NO_ALIASES) -> RunFile:
    """Open a run file, read what its footer says, and close it.

    Args:
        source: the file.
        trainer: who wrote it; None: as the file says.
        aliases: trainer to its own names of columns, which mean another one elsewhere, or none.

    Raises:
        InputError: if it is no Parquet file, damaged, or has no rows.
        SchemaError: if its columns break the contract.
    """
    # First, so that a change in between shows.
    with reading(source.name, "the file"):
        looks = _looks(source) if Path(source.path).exists() else None
    with open_parquet(source) as parquet:
        with reading(source.name, "the footer"):
            footer, schema = parquet.metadata, parquet.schema_arrow
            counts = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
            # A damaged footer may hold names that cannot be decoded: find out here, where it is an input error.
            _ = schema.names, str(schema), footer.metadata
        if footer.num_rows < 0 or min(counts, default=0) < 0 or sum(counts) != footer.num_rows:
            raise InputError(
                f"{source.name}: the footer contradicts itself on the number of rows; write the file again"
            )
        if footer.num_rows == 0:
            raise InputError(f"{source.name}: the file has no rows; check the run that wrote it, or leave it out")
        metadata = RunMetadata.decode(footer.metadata, source.name)
        columns = resolve(schema, source.name, trainer=trainer or metadata.trainer, aliases=aliases)
        chunks = _read_chunks(source)
        numbers = list(dict.fromkeys(each.stored for name, each in columns.items() if name not in TEXTS))
        _check_declared(source, footer, numbers, chunks)
        return RunFile(source, footer, columns, metadata, chunks, looks)


def _looks(source: Source) -> tuple[int, int] | None:
    """Size and time of a file; None of a remote one."""
    if address_of(source.path) is not None:
        return None
    status = Path(source.path).stat()
    return status.st_size, status.st_mtime_ns


def check_size(
    source: Source, footer: pq.FileMetaData, columns: Collection[str] | None, groups: Sequence[int] | None = None
) -> None:
    """Refuse a file of which `columns` decode to far more than it stores; see `declared` and `pages`.

    Raises:
        InputError: if it declares too much, or is damaged.
    """
    chunks = _read_chunks(source)
    _check_declared(source, footer, columns, chunks, groups)
    check_pages(source, footer, chunks, _places(footer, chunks, columns, groups))


def _places(
    footer: pq.FileMetaData,
    chunks: list[list[Chunk]],
    columns: Collection[str] | None,
    groups: Sequence[int] | None,
) -> list[tuple[int, int]]:
    """Row groups and leaves of some columns."""
    leaves = [footer.schema.column(leaf).path for leaf in range(footer.num_columns)]
    read = [leaf for leaf, path in enumerate(leaves) if columns is None or {path, path.split(".")[0]} & {*columns}]
    return [(group, leaf) for group in (range(len(chunks)) if groups is None else groups) for leaf in read]


def _check_declared(
    source: Source,
    footer: pq.FileMetaData,
    columns: Collection[str] | None,
    chunks: list[list[Chunk]],
    groups: Sequence[int] | None = None,
) -> None:
    def reopen(paths: list[str]) -> AbstractContextManager[pq.ParquetFile]:
        check_pages(source, footer, chunks, _places(footer, chunks, paths, groups))
        return open_parquet(source, footer, paths)

    with reading(source.name, "the file"):
        check_declared(footer, chunks, size_of(source.path), source.name, columns, reopen, groups)


def check_pages(
    source: Source, footer: pq.FileMetaData, chunks: list[list[Chunk]], wanted: Sequence[tuple[int, int]]
) -> None:
    """Refuse pages that declare more than the footer says; of a remote file, where each would be a request, none.

    Args:
        source: the file.
        footer: what its footer says.
        chunks: the same of each column chunk.
        wanted: row groups and leaves.

    Raises:
        InputError: if one declares more.
    """
    if not wanted or address_of(source.path) is not None:
        return
    with reading(source.name, "the file"), open_bytes(source.path) as file:
        for group, leaf in wanted:
            try:
                check_chunk(file, chunks[group][leaf])
            except ValueError as error:
                raise InputError(
                    f"{source.name}: row group {group} cannot be read (column {footer.schema.column(leaf).path}: "
                    f"{error}); the file is damaged, write or copy it again"
                ) from None


def _read_chunks(source: Source) -> list[list[Chunk]]:
    with reading(source.name, "the footer"):
        try:
            return read_chunks(source.path)
        except ValueError as error:
            raise damaged(source.name, str(error)) from None


@contextmanager
def open_parquet(
    source: Source, footer: pq.FileMetaData | None = None, dictionaries: Sequence[str] = ()
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file of any kind; it is closed on leaving.

    Args:
        source: the file.
        footer: what its footer says, if that is known.
        dictionaries: paths of columns that stay dictionaries.

    Raises:
        InputError: if it cannot be opened or is not Parquet.
    """
    try:
        handle = open_bytes(source.path)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    with handle:
        _check_magic(handle, source.name)
        is_remote = address_of(source.path) is not None
        with reading(source.name, "the footer"):
            parquet = pq.ParquetFile(
                handle,
                metadata=footer,
                page_checksum_verification=True,
                read_dictionary=list(dictionaries),
                # Of a remote file neighbouring columns come in one request; of a local one none is in memory whole.
                pre_buffer=is_remote,
                buffer_size=0 if is_remote else _BUFFER_BYTES,
            )
        with parquet:
            yield parquet


@contextmanager
def reading(name: str, subject: str) -> Iterator[None]:
    """Turn what pyarrow raises into an `InputError` about `subject` in the file `name`.

    UnicodeDecodeError is what pyarrow's own Python layer raises on damaged names.
    """
    try:
        yield
    except MemoryError:
        raise InputError(
            f"{name}: {subject} asks for more memory than there is; "
            "write the file with smaller row groups, or again if it is damaged"
        ) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        # Arrow reports a codec or an encoding that it lacks as one of several classes.
        if isinstance(error, NotImplementedError) or re.search(r"not (yet )?(supported|implemented)", str(error), re.I):
            raise InputError(
                f"{name}: {subject} uses a Parquet feature that this pyarrow does not have ({_words(error)}); "
                "write the file with plain columns and zstd or snappy"
            ) from None
        if isinstance(error, OSError) and "://" in name:
            raise _no_connection(name, subject, error) from None
        raise InputError(
            f"{name}: {subject} cannot be read ({_words(error)}); the file is damaged, write or copy it again"
        ) from None
    except RolloutDoctorError:
        raise
    except Exception as error:
        # Libraries of stores have errors of their own.
        if "://" not in name:
            raise
        raise _no_connection(name, subject, error) from None


def _check_magic(handle: pa.NativeFile, name: str) -> None:
    with reading(name, "the file"):
        size = handle.size()
        head = handle.read(4)
        handle.seek(max(0, size - 4))
        tail = handle.read(4)
        handle.seek(0)
    if size == 0:
        raise InputError(f"{name}: the file is empty (0 bytes): nothing was written to it")
    if _ENCRYPTED_MAGIC in (head, tail):
        raise InputError(f"{name}: the Parquet file is encrypted; write it without encryption")
    if head != _MAGIC:
        raise InputError(
            f"{name}: not a Parquet file; give the run file, or a trainer's dump to 'rolloutdoctor export --what run'"
        )
    if tail != _MAGIC or size < 12:
        raise InputError(
            f"{name}: the Parquet file is truncated (it has no footer); its writer or copy did not finish, so repeat it"
        )


def _no_connection(name: str, subject: str, error: BaseException) -> InputError:
    return InputError(
        f"{name}: {subject} cannot be read ({_words(error)}); check the connection, or copy the file here"
    )


def _words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= 160 else words[:157] + "..."

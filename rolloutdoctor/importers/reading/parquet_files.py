"""Parquet from elsewhere, in batches that stay small whatever a few stored bytes expand to."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.parquet.files import check_size, reading
from rolloutdoctor.results.errors import InputError

_BATCH_BYTES = 256 * 2**20
_BATCH_ROWS = 1024


def schema_of(path: Path) -> pa.Schema | None:
    """Return the schema of a Parquet file; None if it is none."""
    try:
        # Arrow would take the path for an address, which has to be UTF-8.
        with path.open("rb") as file:
            return pq.read_schema(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return None


def batches(parquet: pq.ParquetFile, source: Source, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an open file.

    A cell that is stored once may be repeated in every row. It is no larger than the stored columns, so batches have
    as many rows as fit if every one of them is that large.

    Args:
        parquet: the file.
        source: what was opened.
        columns: names to read; None: all.

    Raises:
        InputError: if the file is damaged, or decodes to far more than it stores.
    """
    with reading(source.name, "the footer"):
        names = parquet.schema_arrow.names
    twice = next((name for name, times in Counter(names).items() if times > 1 and name in (columns or names)), None)
    if twice is not None:
        raise InputError(f"{source.name}: two columns are called {twice[:80]}; keep one of them")
    check_size(source, parquet.metadata, columns)
    with reading(source.name, "the footer"):
        footer = parquet.metadata
        sizes = [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]
        rows = min(_BATCH_ROWS, max(1, _BATCH_BYTES // max(1, *sizes, 1)))
        stream = parquet.iter_batches(rows, columns=None if columns is None else list(columns))
    while True:
        with reading(source.name, "the rows"):
            batch = next(stream, None)
            if batch is None:
                return
            # Damage can hide in what arrow hands on unseen: bytes that are no text, offsets beyond the end.
            batch.validate(full=True)
        yield batch

"""The history of a wandb run as Parquet."""

import math
from collections.abc import Iterator
from pathlib import Path

from rolloutdoctor.importers.logs.base import STEPS, Entry, Tell, entries_of
from rolloutdoctor.importers.reading.parquet_files import batches
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.parquet.files import open_parquet, reading
from rolloutdoctor.results.errors import DataError

_WANDB = {"_step", "_timestamp"}


class ParquetHistory:
    """A history that `Run.history` or `Run.scan_history` of wandb's API gave, written as Parquet."""

    def detect(self, path: Path) -> str | None:
        """Look at the names of the columns."""
        is_it = path.is_file() and not path.name.endswith(".metrics.parquet") and set(_parquet_names(path)) >= _WANDB
        return "the history of a wandb run" if is_it else None

    def read(self, source: Source, tell: Tell) -> Iterator[Entry]:
        """Yield the rows that have a step."""
        return _parquet(source)


def _parquet_names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names: list[str] = pq.read_schema(path).names
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []
    return names


def _parquet(source: Source) -> Iterator[Entry]:
    """A wandb history: a row for each call, null for what it did not log, and columns of histograms among the rest."""
    from pyarrow import types

    with open_parquet(source) as parquet:
        with reading(source.name, "the footer"):
            schema = parquet.schema_arrow
            plain = [field.name for field in schema if types.is_integer(field.type) or types.is_floating(field.type)]
        named = next((name for name in STEPS if name in plain), None)
        if named is None:
            raise DataError(f"{source.name}: no step; its number has to be in a column of {', '.join(STEPS)}")
        number = 0
        for batch in batches(parquet, source, plain):
            for row in batch.to_pylist():
                number += 1
                if row[named] is not None and not math.isnan(row[named]):
                    given = {name: cell for name, cell in row.items() if cell is not None}
                    yield from entries_of(given, f"{source.name}, row {number}")

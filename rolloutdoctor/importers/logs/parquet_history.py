"""Logged numbers as Parquet: the history of a wandb run, or any table with a step and metrics."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutdoctor.data.schema import METADATA_KEY
from rolloutdoctor.importers.logs.kinds_of_rows import is_history
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.rows import OF_UPDATES, STEPS, entries_of, is_of_update, of_rollouts
from rolloutdoctor.importers.reading.parquet_files import batches, schema_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.parquet.files import open_parquet, reading
from rolloutdoctor.results.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetHistory:
    """A table of logged numbers: a row for each step with a column for each metric, or a row for each value.

    So is a history that `Run.history` or `Run.scan_history` of wandb's API gave, written as Parquet.
    """

    def detect(self, path: Path) -> str | None:
        """Look at the names and types of the columns."""
        if not path.is_file() or path.name.endswith(".metrics.parquet"):
            return None
        schema = schema_of(path)
        if schema is None or METADATA_KEY.encode() in (schema.metadata or {}):
            return None
        if is_history(schema.names):
            return "the history of a wandb run"
        return "a Parquet table of logged numbers" if _is_log(schema) else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows that have a step: of a call to wandb null is what it did not log, or a histogram."""
        from pyarrow import types

        with open_parquet(source) as parquet:
            with reading(source.name, "the footer"):
                schema = parquet.schema_arrow
                plain = [
                    field.name for field in schema if types.is_integer(field.type) or types.is_floating(field.type)
                ]
                plain += [name for name in ("name", "split") if name in schema.names]
            named = next((name for name in STEPS if name in plain), None)
            if named is None:
                raise DataError(f"{source.name}: no step; its number has to be in a column of {', '.join(STEPS)}")
            is_printed = named == "step" and bool(OF_UPDATES & {*plain}) and "split" not in plain
            rows = (row for batch in batches(parquet, source, plain) for row in batch.to_pylist())
            for number, row in enumerate(rows, start=1):
                if row[named] is not None and not math.isnan(row[named]):
                    cells = {name: cell for name, cell in row.items() if cell is not None}
                    yield from entries_of(cells, f"{source.name}, row {number}", notes, is_printed=is_printed)


def _is_log(schema: "pa.Schema") -> bool:
    """Tell a table with a step and nothing of a rollout: no text, no list, no name that only a rollout has.

    A reward is of a rollout, unless what an update gives is logged beside it.
    """
    from pyarrow import types

    names = set(schema.names)
    if not names & {*STEPS}:
        return False
    if {"step", "name", "value"} <= names <= {"step", "split", "name", "value"}:
        return True
    others = [field for field in schema if field.name not in (*STEPS, "split") and not types.is_null(field.type)]
    if not others or any(not types.is_primitive(field.type) for field in others):
        return False
    return is_of_update(names) or of_rollouts(names) <= ({"reward"} if any("/" in name for name in names) else set())

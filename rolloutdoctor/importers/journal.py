"""Journals that a recorder of rolloutdoctor leaves when its process is killed: `*.journal`, one for each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from rolloutdoctor.importers import base
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata, joined_ranks
from rolloutdoctor.io.write.journal import Dropped, Journal, is_journal
from rolloutdoctor.results.errors import InputError

Keys = set[tuple[int, str]]


class RecordingJournal:
    """A recording that was not closed, by the recorders of this version.

    Every step that was appended before the process died is whole. Of several ranks, a step counts if all of them
    have it.
    """

    name = "journal"
    summary = "a recording that was not closed (run.parquet.journal)"
    logs_beside = True
    checks_files = False
    omits_rows = False
    recording: Mapping[str, str] = {}

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the name and the first bytes."""
        return "the file is the journal of a recording that was not closed" if is_journal(path) else None

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the steps of every journal in turn."""
        base.only_columns(self.name, options, ())
        journals = [Journal.open(source) for source in sources]
        keys = [_keys(journal) for journal in journals]
        left_out = {key for each in keys for key in each if not all(key in others for others in keys)}
        schema = schema_of(journals)
        sink.begin(metadata_of(journals))
        done, total = 0, sum(journal.size for journal in journals)
        for journal in journals:
            self._tell(journal, sink)
            for table in journal.tables(schema):
                remaining = _without(table, left_out)
                if len(remaining):
                    sink.write({name: remaining[name] for name in remaining.column_names})
            for table in journal.logs():
                for row in table.to_pylist():
                    sink.log(row["step"], row["split"], {row["name"]: row["value"]})
            done += journal.size
            sink.advance(done, total)
        if left_out:
            sink.note(f"{len(left_out)} steps that not every rank had recorded are left out")

    def _tell(self, journal: Journal, sink: base.RunSink) -> None:
        if journal.end < journal.size:
            sink.note(f"{journal.source.name}: the step that was being written when the process died is left out")
        if journal.dropped:
            sink.note(f"{journal.source.name}: {journal.dropped}")


def _keys(journal: Journal) -> Keys:
    keys: Keys = set()
    for table in journal.tables():
        if not {"step", "split"}.issubset(table.column_names):
            raise InputError(f"{journal.source.name}: rows without step and split; no recorder writes that")
        pairs = table.group_by(["step", "split"]).aggregate([])
        keys.update(zip(pairs["step"].to_pylist(), pairs["split"].to_pylist(), strict=True))
    return keys


def metadata_of(journals: Sequence[Journal]) -> RunMetadata:
    """Return what the journals of all ranks say of the run, and of what was dropped."""
    dropped = Dropped(
        tuple(step for journal in journals for step in journal.dropped.steps),
        sum(journal.dropped.logs for journal in journals),
    )
    ranks = joined_ranks(journal.metadata for journal in journals)
    return replace(journals[0].metadata, recording=dropped.metadata() | ranks)


def schema_of(journals: Sequence[Journal]) -> pa.Schema:
    """Return every column that the journal of any rank has.

    Raises:
        InputError: if a column is of one type here and of another there.
    """
    joined = journals[0]
    for journal in journals[1:]:
        joined = joined.joined(journal)
    return joined.schema


def _without(table: pa.Table, keys: Keys) -> pa.Table:
    import pyarrow.compute as pc

    for step, split in keys:
        table = table.filter(pc.invert(pc.and_(pc.equal(table["step"], step), pc.equal(table["split"], split))))
    return table

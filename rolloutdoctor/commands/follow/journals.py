"""Follow the journals of a recorder while it records: what was read once is never read again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from rolloutdoctor.commands.follow.feed import Fresh, late_rows, whole_steps
from rolloutdoctor.commands.follow.trail import Trail
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.importers.base import RunSink
from rolloutdoctor.importers.journal import RecordingJournal, metadata_of, schema_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.parquet.files import read_footer
from rolloutdoctor.io.run import Run
from rolloutdoctor.io.write.journal import JournalTail, filled, is_log
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.table import ALIASES

_READ_BYTES = 16 * 2**20
"""Read of each journal at a time."""


class JournalFeed:
    """The journals of one recording, one for each rank. A step counts once every rank has it."""

    def __init__(self, sources: Sequence[Source], trainer: str | None) -> None:
        self._sources, self._trainer = tuple(sources), trainer
        self.name = " ".join(source.name for source in sources)
        self.files: tuple[str, ...] = (self.name,)
        self.trail = Trail()
        self.replaced, self.waits_for = False, ""
        self._sizes: tuple[tuple[int, int], ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._tails = [JournalTail(source) for source in self._sources]
        self._rows: list[dict[StepKey, list[pa.Table]]] = [{} for _ in self._sources]
        self._begun = [-1 for _ in self._sources]
        self._logged: int | None = None
        self._taken = StepSpans()
        self._is_rewound = True

    def rewind(self) -> None:
        """Read from the start again; what the columns and the log are is known already."""
        journals = [tail.journal for tail in self._tails]
        self._begin()
        for tail, journal in zip(self._tails, journals, strict=True):
            tail.journal.schema = journal.schema

    @property
    def is_closed(self) -> bool:
        """True if a journal is there no more: its recorder has made a run file of it."""
        return not all(Path(source.path).exists() for source in self._sources)

    def changed(self) -> bool:
        """Tell whether a journal has grown."""
        stamps = []
        for source in self._sources:
            try:
                status = Path(source.path).stat()
            except OSError:
                return False
            stamps.append((status.st_size, status.st_ino))
        before, self._sizes = self._sizes, tuple(stamps)
        self.replaced = bool(before) and any(old[1] != new[1] for old, new in zip(before, stamps, strict=True))
        return self._sizes != before

    @contextmanager
    def fresh(self, counted: StepSpans, *, ended: bool) -> Iterator[Fresh | None]:
        """Read on until some steps are whole, or the journals end."""
        self._is_rewound = False
        ready: list[StepKey] = []
        is_more = True
        while is_more and not ready:
            is_more = False
            for number, tail in enumerate(self._tails):
                is_more |= self._read(number, tail, counted)
            ready = self._ready(counted, ended=ended and not is_more)
        if not ready:
            yield None
            return
        with scratch_folder() as folder:
            yield Fresh(self._run(folder / "run.parquet", ready), tuple(ready))
        for key in ready:
            for rows in self._rows:
                rows.pop(key, None)
            if not self._is_rewound:
                self._taken.add(key)

    def _read(self, number: int, tail: JournalTail, counted: StepSpans) -> bool:
        begin = tail.journal.end
        for table in tail.read(_READ_BYTES):
            if is_log(table):
                self._log(table)
                continue
            for key, rows in _by_step(table, tail.journal.source.name):
                self._begun[number] = max(self._begun[number], key.step)
                if key in self._taken:
                    raise late_rows(tail.journal.source.name, key)
                if key not in counted:
                    self._rows[number].setdefault(key, []).append(rows)
        return tail.journal.end > begin

    def _log(self, table: pa.Table) -> None:
        values: dict[StepKey, dict[str, float]] = {}
        for row in table.to_pylist():
            key = StepKey(row["step"], row["split"])
            metrics = values.setdefault(key, {})
            if row["value"] is not None:
                metrics[row["name"]] = row["value"]
        for key, metrics in values.items():
            if metrics:
                self.trail.add(key, metrics)
            if key.split == TRAIN:
                self._logged = max(self._logged or 0, key.step)

    def _ready(self, counted: StepSpans, *, ended: bool) -> list[StepKey]:
        there = set(self._rows[0]).intersection(*self._rows[1:])
        dropped = {StepKey(*key) for tail in self._tails for key in tail.journal.dropped.steps}
        begun = min(self._begun)
        return list(whole_steps(there - dropped, counted, begun=begun, logged=self._logged, ended=ended))

    def _run(self, path: Path, ready: Sequence[StepKey]) -> Run:
        journals = [tail.journal for tail in self._tails]
        schema = schema_of(journals)
        with RunSink(path, importer=RecordingJournal.name) as sink:
            sink.begin(metadata_of(journals))
            for rows in self._rows:
                for key in ready:
                    for table in rows[key]:
                        sink.write(filled(table, schema))
        file = read_footer(Source(str(path), self.name), self._trainer, ALIASES)
        return Run([file], file.metadata, self.trail.metrics(), self._sources)


def _by_step(table: pa.Table, name: str) -> Iterator[tuple[StepKey, pa.Table]]:
    """Cut a table of rows into those of each step and split; a recorder writes one for each."""
    if not {"step", "split"}.issubset(table.column_names):
        raise InputError(f"{name}: rows without step and split; no recorder writes that")
    steps, splits = table["step"].to_pylist(), table["split"].to_pylist()
    keys = dict.fromkeys(zip(steps, splits, strict=True))
    if len(keys) == 1:
        yield StepKey(*next(iter(keys))), table
        return
    for step, split in keys:
        chosen = [key == (step, split) for key in zip(steps, splits, strict=True)]
        yield StepKey(step, split), table.filter(pa.array(chosen))

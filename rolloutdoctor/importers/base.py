"""Interface of importers, and the sink that they stream canonical rows, logged metrics and facts into."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from rolloutdoctor.data.schema import IMPORT_METRICS, TEXTS
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.io.write.writer import MetricsWriter, RunWriter, metrics_path, placed_together
from rolloutdoctor.results.errors import DataError, UsageError

LOST_ROWS = f"{IMPORT_METRICS}lost_rows"
MIXED_ROWS = f"{IMPORT_METRICS}mixed_rows"
REPEATED_ROWS = f"{IMPORT_METRICS}repeated_rows"
TORN_LINES = f"{IMPORT_METRICS}torn_lines"
"""Facts about a dump, which go to rule RDI002 as metrics of the step."""

_ROW_GROUP_BYTES = 16 * 2**20
"""Small, so that few rows wait in memory."""


@dataclass(frozen=True)
class ImportOptions:
    """Options that the user gave for a dump.

    Attributes:
        columns: canonical column to where the dump has it.
        allow_pickle: True to load files that can run code when they are loaded.
        text: False to leave prompts and responses out.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    allow_pickle: bool = False
    text: bool = True


class Importer(Protocol):
    """Reads what one program writes. The docstring names its versions, and the upstream file that writes the dump."""

    name: str
    summary: str
    logs_beside: bool
    """True if a folder of the dump may hold logs of numbers too; False if the importer finds its own."""
    checks_files: bool
    """True if it looks for files that were overwritten, mixed, repeated or torn, which RDI002 reports."""
    omits_rows: bool
    """True if the dump need not hold all rows of a step, so that means over a step prove nothing."""
    recording: Mapping[str, str]
    """Canonical column to what would bring it, in the words of who wrote the dump; ``*`` is any other column."""

    def detect(self, path: Path) -> str | None:
        """Say why `path`, a file or a directory, is a dump of this kind; None if it is not. Reads little of it."""
        ...

    def read(self, sources: Sequence[Source], sink: "RunSink", options: ImportOptions) -> None:
        """Stream the rows and metrics of `sources` into `sink`, with memory that follows a step and not the dump.

        Raises:
            InputError: if a file cannot be read as what it should be.
        """
        ...


@runtime_checkable
class ReadsByStep(Protocol):
    """An importer whose dump has files of their own for each step, so that some of them can be read alone."""

    def step_files(self, sources: Sequence[Source]) -> list[Source]:
        """Return the files of the dump, in their order."""
        ...


class RunSink:
    """Sink of an importer: a run file with its metrics table, which appear together at the end or not at all.

    Args:
        path: name of the run file.
        text: False to drop prompts and responses.
        progress: called with the bytes read so far, and the bytes to read.
        importer: name of the importer, for the metadata of the file; None: it says nothing of it.
        complete: adds to what the importer says of the run.

    Attributes:
        note: takes what the user should know about how the dump was read, one sentence at a time.
        told: what was done beside.
    """

    def __init__(
        self,
        path: Path,
        *,
        text: bool = True,
        progress: Progress | None = None,
        importer: str | None = None,
        complete: "Callable[[RunSink, RunMetadata], RunMetadata]" = lambda sink, metadata: metadata,
    ) -> None:
        self.path = path
        self.importer = importer
        self._complete = complete
        self.text = text
        self.note = ReaderNotes()
        self.told: list[str] = []
        self.advance: Progress = progress or (lambda done, total: None)
        self._run: RunWriter | None = None
        self._metrics = MetricsWriter(metrics_path(path))
        self._facts: dict[tuple[int, str], dict[str, float]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about how the dump was read, one sentence each."""
        return self.note.sentences

    @property
    def rows(self) -> int:
        """Rows written so far."""
        return 0 if self._run is None else self._run.rows

    def begin(self, metadata: RunMetadata) -> None:
        """Say who wrote the dump; to be called once, before the first rows."""
        metadata = self._complete(self, metadata)
        self._run = RunWriter(
            self.path,
            metadata
            if self.importer is None
            else replace(metadata, recording={**metadata.recording, "importer": self.importer}),
            row_group_bytes=_ROW_GROUP_BYTES,
        )

    def write(self, columns: Mapping[str, Sequence[object]]) -> None:
        """Append rows, one sequence of cells for each column; every call brings the same columns."""
        assert self._run is not None  # importers begin first
        if not self.text:
            columns = {name: cells for name, cells in columns.items() if name not in TEXTS}
        self._run.write(columns)

    def write_from(self, file: Source, columns: Mapping[str, Sequence[object]]) -> None:
        """Append rows that come from `file`, so that the message of an error names it.

        Raises:
            DataError: if a cell does not fit its column.
        """
        try:
            self.write(columns)
        except DataError as error:
            message = str(error).removeprefix(f"{self.path}: ")
            raise DataError(f"{file.name}: {message}") from None

    def log(self, step: int, split: str, values: Mapping[str, float | None]) -> None:
        """Append what the trainer logged at one step."""
        self._metrics.write(step, split, values)

    def fact(self, step: int, split: str, name: str, value: float) -> None:
        """Add to what is known about the dump of one step. The step must have rows of that split."""
        facts = self._facts.setdefault((step, split), {})
        facts[name] = facts.get(name, 0.0) + value

    def tell(self, text: str) -> None:
        """Say in one sentence what was done; what qualifies the rows and numbers is a `note`."""
        self.told.append(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self._run is None:
            self._metrics.abort()
            if self._run is not None:
                self._run.abort()
            return
        with placed_together(self._run, self._metrics):
            self._run.notes = self.notes
            for (step, split), facts in sorted(self._facts.items()):
                self._metrics.write(step, split, facts)
            # An older table of that name would be taken for the metrics of the new run.
            if not self._metrics.rows and not metrics_path(self.path).exists():
                self._metrics.abort()


def stored_name(options: ImportOptions, column: str, default: str) -> str:
    """Return where the dump has a column: as the user says, else as its trainer writes it."""
    return options.columns.get(column, default)


def only_columns(importer: str, options: ImportOptions, columns: Sequence[str]) -> None:
    """Refuse a mapping that an importer would ignore.

    Raises:
        UsageError: if a column is mapped that is not in `columns`.
    """
    for column in options.columns:
        if column not in columns:
            able = f"only {', '.join(columns)} can be mapped there" if columns else "nothing can be mapped there"
            raise UsageError(
                f"--map {column}={options.columns[column]}: the importer {importer} knows its columns; {able}, "
                "and --from mapped reads any column"
            )

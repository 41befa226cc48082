"""Tell a trainer's own dump, and turn it into a run file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.importers.base import Importer, ImportOptions, RunSink
from rolloutdoctor.importers.journal import RecordingJournal
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.table import detect, find
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.locations.targets import OutputError, Target
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.opening.nested import looking
from rolloutdoctor.opening.stated_options import completed, stated_beside
from rolloutdoctor.results.errors import InputError, UsageError

MAPPED = "mapped"


@dataclass(frozen=True)
class ConvertOptions:
    """Options of converting a dump.

    Attributes:
        importer: name of the importer; None: found out.
        columns: canonical column to where the dump has it.
        allow_pickle: True to load files that can run code.
        text: False to leave prompts and responses out.
    """

    importer: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    allow_pickle: bool = False
    text: bool = True

    @property
    def asked_for(self) -> bool:
        """True if the user says that the input is a dump."""
        return self.importer is not None or bool(self.columns)


@dataclass(frozen=True)
class Detected:
    """A dump and who reads it.

    Attributes:
        importer: who.
        why: in words.
        sources: files and directories of the dump.
        logs: logs of numbers that were given with it.
    """

    importer: Importer
    why: str
    sources: tuple[Source, ...]
    logs: tuple[Source, ...]


def detect_dump(paths: Sequence[str], options: ConvertOptions) -> Detected | None:
    """Find out whether `paths` are a trainer's own dump; None if they are run files.

    Raises:
        InputError: if a path does not exist, or two are dumps of different kinds.
        UsageError: for an unknown importer.
    """
    with looking(paths):
        return _detect_dump(paths, options)


def _detect_dump(paths: Sequence[str], options: ConvertOptions) -> Detected | None:
    chosen = find(options.importer) if options.importer is not None else None
    existing = [path for path in paths if os.path.exists(path)]  # noqa: PTH110 - keeps the name as given
    logs = [path for path in existing if kind_of(Path(path)) is not None and detect(Path(path)) is None]
    dumps = [path for path in existing if path not in logs]
    if options.asked_for or logs:
        for path in paths:
            if path not in existing:
                why = "no such file or directory; check the path"
                if address_of(path) is not None:
                    why = "dumps, and runs that logs are given with, are read from this machine; copy it here"
                raise InputError(f"{Source.of(path).name}: {why}")
    if logs and not dumps:
        raise InputError(
            f"{Source.of(logs[0]).name}: logged metrics, not rollouts; give a run file or a dump as well "
            "(check, info, identify, why, compare, report, view and plot overview read a log alone)"
        )
    if chosen is None and options.columns and not any(detect(Path(path)) for path in dumps):
        chosen = find(MAPPED)
    if chosen is not None:
        why = "as asked for" if options.importer else "columns were mapped"
    else:
        detected = [detect(Path(path)) for path in dumps]
        recognised = [each for each in detected if each is not None]
        if not recognised:
            return None
        if len(recognised) < len(dumps) and {importer.name for importer, _ in recognised} == {RecordingJournal.name}:
            # Some ranks were killed, and others have closed their files.
            return None
        if len(recognised) < len(dumps) or len({importer.name for importer, _ in recognised}) > 1:
            names = ", ".join(sorted({"run file" if each is None else each[0].name for each in detected}))
            raise InputError(f"the inputs are of different kinds ({names}); give one run at a time")
        chosen, why = recognised[0]
    for path in dumps:
        if Path(path).is_dir() and chosen.logs_beside:
            inside = sorted(str(each) for each in Path(path).iterdir() if kind_of(each) is not None)
            logs += inside
    return Detected(chosen, why, tuple(map(Source.of, dumps)), tuple(map(Source.of, logs)))


def convert(dump: Detected, output: Path, options: ConvertOptions, progress: Progress | None = None) -> RunSink:
    """Write a dump as a run file with its metrics table; both appear whole or not at all.

    Raises:
        InputError: if the dump cannot be read.
        UsageError: if nothing can be written there, or the output is one of the inputs.
    """
    _check_outputs(dump, output)
    import_options = ImportOptions(options.columns, options.allow_pickle, options.text)
    places = [source.path for source in dump.sources]

    def complete(sink: RunSink, metadata: RunMetadata) -> RunMetadata:
        if dump.importer.name == RecordingJournal.name:
            return metadata
        return completed(metadata, stated_beside(places, dump.logs, sink.tell), sink.tell)

    with RunSink(output, text=options.text, progress=progress, importer=dump.importer.name, complete=complete) as sink:
        for log in dump.logs:
            for step, split, values in read_log(log, LogNotes(sink.note)):
                sink.log(step, split, values)
        dump.importer.read(dump.sources, sink, import_options)
        if not sink.rows:
            raise InputError(f"{dump.sources[0].name}: the dump holds no rollouts")
    return sink


def _check_outputs(dump: Detected, output: Path) -> None:
    """Refuse to write a run file and its metrics table over what is read, or over metrics that are of something else.

    Raises:
        UsageError: if one of them cannot be written there.
    """
    inputs = [source.path for source in (*dump.sources, *dump.logs)]
    run, metrics = Target.of(output), Target.of(metrics_path(output))
    for target in (run, metrics):
        target.check_whole("a Parquet file")
        target.refuse(inputs, "is an input")
    if metrics.found is not None and run.found is None:
        raise UsageError(
            f"{metrics.name} is there without {run.name}: a run file of that name would be read with these metrics, "
            "and its own would replace them; name another file, or move the table"
        )


def converted(dump: Detected, path: Path, options: ConvertOptions, advance: Progress | None) -> RunSink:
    """Convert a dump into a temporary file.

    Raises:
        InputError: if it cannot be read, or there is no space for the file.
    """
    try:
        return convert(dump, path, options, advance)
    except OutputError as error:
        raise InputError(
            f"a dump is read through a temporary file, and {path.parent.parent} cannot take it "
            f"({error.why or error}); set TMPDIR to a folder with more space"
        ) from None

"""A trainer's own dump into a run file; and one way for every command to open either of them."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.importers.base import Importer, ImportOptions, RunSink
from rolloutdoctor.importers.journal import RecordingJournal
from rolloutdoctor.importers.logs.base import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.table import detect, find
from rolloutdoctor.importers.unknown import not_understood
from rolloutdoctor.io.locations.paths import METRIC_SUFFIXES, Source, call, expand, natural_key, reason
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.locations.targets import OutputError, Target
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import (
    LoggedMetrics,
    check_one_log,
    contradiction,
    differences,
    joined,
    read_metrics,
    steps_of_lines,
    values_by_step,
)
from rolloutdoctor.io.parquet.files import read_footer
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.io.run import Run, open_run
from rolloutdoctor.io.standard_input import STANDARD_INPUT, standard_input
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.metric_names.generic import taken_for
from rolloutdoctor.metric_names.table import writers
from rolloutdoctor.opening.beside import completed, newest_state, stated_beside
from rolloutdoctor.opening.nested import holds_run, with_nested
from rolloutdoctor.results.errors import InputError, SeveralRunsError, UsageError
from rolloutdoctor.trainers.table import ALIASES, TRAINERS, trainer_from_metric_names

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


@contextmanager
def _looking(paths: Sequence[str]) -> Iterator[None]:
    """Turn what cannot be looked at, a folder that is shut, into one sentence."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else paths[0]
        raise InputError(f"{Source.of(where).name}: {reason(error)}") from None


def detect_dump(paths: Sequence[str], options: ConvertOptions) -> Detected | None:
    """Find out whether `paths` are a trainer's own dump; None if they are run files.

    Raises:
        InputError: if a path does not exist, or two are dumps of different kinds.
        UsageError: for an unknown importer.
    """
    with _looking(paths):
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
        found = [detect(Path(path)) for path in dumps]
        known = [each for each in found if each is not None]
        if not known:
            return None
        if len(known) < len(dumps) and {importer.name for importer, _ in known} == {RecordingJournal.name}:
            # Some ranks were killed, and others have closed their files.
            return None
        if len(known) < len(dumps) or len({importer.name for importer, _ in known}) > 1:
            names = ", ".join(sorted({"run file" if each is None else each[0].name for each in found}))
            raise InputError(f"the inputs are of different kinds ({names}); give one run at a time")
        chosen, why = known[0]
    for path in dumps:
        if Path(path).is_dir() and chosen.logs_beside:
            inside = sorted(str(each) for each in Path(path).iterdir() if kind_of(each) is not None)
            logs += inside
    return Detected(chosen, why, tuple(map(Source.of, dumps)), tuple(map(Source.of, logs)))


def logs_of(paths: Sequence[str]) -> tuple[Source, ...]:
    """Return the logs of numbers that `paths` name, a folder by those in it; none if something else is there too."""
    with _looking(paths):
        return _logs_of(paths)


def _logs_of(paths: Sequence[str]) -> tuple[Source, ...]:
    logs: list[str] = []
    for path in paths:
        here = Path(path)
        if _is_log(here):
            inside = [path]
        elif here.is_dir() and detect(here) is None and not any(_is_run_file(each) for each in here.iterdir()):
            inside = sorted(str(each) for each in here.iterdir() if each.is_file() and _is_log(each))
            state = None if inside else newest_state(here)
            inside += [] if state is None else [str(state)]
        else:
            inside = []
        if not inside:
            return ()
        logs += inside
    return tuple(map(Source.of, logs))


def read_logs(logs: Sequence[Source], notes: ReaderNotes | None = None) -> LoggedMetrics:
    """Read logs of numbers; where a step, split and name occur twice the last wins, as in a table of metrics.

    Args:
        logs: the logs.
        notes: takes what a log does not say, and what was left out of it; None: it is dropped.

    Raises:
        InputError: if one cannot be read, or holds no number.
        SeveralRunsError: if they are of several runs.
    """
    notes = ReaderNotes() if notes is None else notes
    tables = [(log.name, _read_log(log, notes)) for log in logs]
    total = max((table.total_steps for _, table in tables if table.total_steps), default=None)
    tables = [(name, _at_steps_of(table, name, tables, notes)) for name, table in tables]
    check_one_log(tables)
    writers = [(name, trainer_from_metric_names(table.names())) for name, table in tables]
    known = [(name, writer.name) for name, writer in writers if writer is not None]
    for second, writer in known[1:]:
        if writer != known[0][1]:
            raise SeveralRunsError(
                f"{known[0][0]} and {second} are not of one run: their metrics are those of {known[0][1]} and {writer};"
                " give one of them, or check them with --each"
            )
    found = joined([table for _, table in tables])
    for name, table in reversed(tables[:-1]):
        for key, metric, value, last in differences(table, found):
            notes.repeated(f"{name} and {tables[-1][0]}", key, metric, value, last)
    found.total_steps = total
    found.counted_steps = all(table.counted_steps for _, table in tables)
    if not any(found.at(key) for key in found.steps()):
        raise InputError(f"{logs[0].name}: no number was logged there")
    return found


def _at_steps_of(
    table: LoggedMetrics, name: str, others: Iterable[tuple[str, LoggedMetrics]], tell: Callable[[str], None]
) -> LoggedMetrics:
    """Return a log under the steps of another one that holds the same lines, where it counts its own from 1."""
    for other, lines in others:
        steps = steps_of_lines(table, lines)
        if steps is not None:
            tell(f"{name}: its lines are those of {other}, and take their steps")
            return table.at_steps(steps)
    return table


def are_apart(one: LoggedMetrics, other: LoggedMetrics) -> bool:
    """Tell whether two logs are of two runs: of two trainers, or with two values of one metric at a step."""
    writers = [trainer_from_metric_names(table.names()) for table in (one, other)]
    if writers[0] != writers[1] and None not in writers:
        return True
    is_same = any(steps_of_lines(*pair) is not None for pair in ((one, other), (other, one)))
    return not is_same and contradiction(one, other) is not None


def _read_log(log: Source, notes: ReaderNotes) -> LoggedMetrics:
    if log.path.endswith(METRIC_SUFFIXES):
        return read_metrics([log], notes)
    of_log = LogNotes(notes)
    entries = ((StepKey(step, split), found) for step, split, found in read_log(log, of_log))
    metrics = LoggedMetrics(values_by_step(entries, log.name, notes))
    metrics.total_steps, metrics.counted_steps = of_log.total_steps, of_log.counted_steps
    return metrics


def _tell_generic_names(names: Collection[str], tell: Callable[[str], None]) -> None:
    """Say which names are taken for what, where they are no trainer's that is known."""
    taken = [f"{name} as {title}" for name, title in taken_for(names).items()]
    if taken:
        tell(f"the names of the metrics are of no trainer that is known; read are {', '.join(taken)}")


def _is_run(path: str) -> bool:
    return holds_run(Path(path)) or newest_state(Path(path)) is not None or any(Path(path).glob("*.journal"))


def _is_log(path: Path) -> bool:
    return (path.name.endswith(METRIC_SUFFIXES) and path.is_file()) or kind_of(path) is not None


def _is_run_file(path: Path) -> bool:
    return path.suffix == ".parquet" and not _is_log(path)


def convert(found: Detected, output: Path, options: ConvertOptions, progress: Progress | None = None) -> RunSink:
    """Write a dump as a run file with its metrics table; both appear whole or not at all.

    Raises:
        InputError: if the dump cannot be read.
        UsageError: if nothing can be written there, or the output is one of the inputs.
    """
    _check_outputs(found, output)
    import_options = ImportOptions(options.columns, options.allow_pickle, options.text)
    places = [source.path for source in found.sources]

    def complete(sink: RunSink, metadata: RunMetadata) -> RunMetadata:
        if found.importer.name == RecordingJournal.name:
            return metadata
        return completed(metadata, stated_beside(places, found.logs, sink.tell), sink.tell)

    with RunSink(output, text=options.text, progress=progress, importer=found.importer.name, complete=complete) as sink:
        for log in found.logs:
            for step, split, values in read_log(log, LogNotes(sink.note)):
                sink.log(step, split, values)
        found.importer.read(found.sources, sink, import_options)
        if not sink.rows:
            raise InputError(f"{found.sources[0].name}: the dump holds no rollouts")
    return sink


def _check_outputs(found: Detected, output: Path) -> None:
    """Refuse to write a run file and its metrics table over what is read, or over metrics that are of something else.

    Raises:
        UsageError: if one of them cannot be written there.
    """
    inputs = [source.path for source in (*found.sources, *found.logs)]
    run, metrics = Target.of(output), Target.of(metrics_path(output))
    for target in (run, metrics):
        target.check_whole("a Parquet file")
        target.refuse(inputs, "is an input")
    if metrics.found is not None and run.found is None:
        raise UsageError(
            f"{metrics.name} is there without {run.name}: a run file of that name would be read with these metrics, "
            "and its own would replace them; name another file, or move the table"
        )


@contextmanager
def _with_logs(
    paths: Sequence[str], trainer: str | None, tell: Callable[[str], None], options: ConvertOptions
) -> Iterator[Run]:
    """Open run files, and the logs of numbers and recordings that were not closed that were given with them.

    Raises:
        InputError: if nothing is found or it cannot be read.
    """
    with _looking(paths):
        paths = [each for path in paths for each in _named_apart(path)]
        given = [path for path in paths if Path(path).is_file() and _is_other_log(path)]
    files = [path for path in paths if path not in given]
    for path in files:
        why = not_understood(Path(path))
        if why is not None:
            raise InputError(f"{Source.of(path).name}: {why}")
    found = expand(files)
    with ExitStack() as stack:
        made: dict[str, str] = {}
        for journal in found.journals:
            tell(f"{journal.name}: a recording that was not closed")
            file = stack.enter_context(scratch_folder()) / "run.parquet"
            stack.enter_context(call(str(file), journal.name))
            stack.enter_context(call(str(metrics_path(file)), journal.name))
            sink = _converted(Detected(RecordingJournal(), "", (journal,), ()), file, options, None)
            for sentence in sink.told:
                tell(sentence)
            made[journal.path] = str(file)
        if made:
            # In the order of the ranks.
            sources = sorted((*found.files, *found.journals), key=lambda source: natural_key(source.name))
            files = [made.get(source.path, source.path) for source in sources] + [each.path for each in found.metrics]
        # Not kept here: what is open is closed when nobody has the run any more.
        yield _completed_by(given, open_run(files, trainer=trainer, aliases=ALIASES, origins=found.journals), tell)


def _completed_by(given: Sequence[str], run: Run, tell: Callable[[str], None]) -> Run:
    """Return a run with the logs of numbers that were given with it."""
    if given:
        logs = tuple(map(Source.of, given))
        tell(f"logged metrics from {', '.join(dict.fromkeys(str(kind_of(Path(path))) for path in given))}")
        metrics, own = read_logs(logs, run.notes), [("the run", run.metrics)]
        metrics = _at_steps_of(metrics, logs[0].name, own, run.notes)
        for key, name, value, last in differences(metrics, run.metrics):
            run.notes.repeated(f"{logs[0].name} and the run", key, name, value, last)
        run = run.with_logs(metrics, logs)
        if not run.metadata.config:
            writer = trainer_from_metric_names(run.metrics.names())
            run.metadata = completed(run.metadata, stated_beside((), logs, tell), tell, writer)
        run.metadata = run.metadata.with_total_steps(metrics.total_steps)
    return run


def _converted(found: Detected, path: Path, options: ConvertOptions, advance: Progress | None) -> RunSink:
    """Convert a dump into a temporary file.

    Raises:
        InputError: if it cannot be read, or there is no space for the file.
    """
    try:
        return convert(found, path, options, advance)
    except OutputError as error:
        raise InputError(
            f"a dump is read through a temporary file, and {path.parent.parent} cannot take it "
            f"({error.why or error}); set TMPDIR to a folder with more space"
        ) from None


def _named_apart(path: str) -> list[str]:
    """The files of a folder by their names where one of its Parquet files is a log; else the path as it is."""
    if not Path(path).is_dir():
        return [path]
    try:
        found = expand([path])
    except InputError:
        why = not_understood(Path(path))
        if why is None:
            raise
        raise InputError(f"{Source.of(path).name}: {why}") from None
    is_log = [kind_of(Path(file.path)) is not None for file in found.files]
    if all(is_log) or not any(is_log):
        return [path]
    return [source.path for source in (*found.files, *found.journals, *found.metrics)]


def _is_other_log(path: str) -> bool:
    """True if a file is a log of numbers, and not a table of metrics, which belongs to a run file."""
    return not path.endswith(METRIC_SUFFIXES) and kind_of(Path(path)) is not None


@contextmanager
def open_any(
    paths: Sequence[str],
    *,
    trainer: str | None,
    options: ConvertOptions,
    tell: Callable[[str], None],
    progress: "Callable[[], AbstractContextManager[Progress | None]]" = nullcontext,
    logs_alone: bool = False,
) -> Iterator[Run]:
    """Open run files as they are, and a trainer's own dump through a temporary run file, removed on leaving.

    Args:
        paths: as the user gave them.
        trainer: who wrote the files, or None: as they say.
        options: how to read a dump; with `text` its prompts and responses too.
        tell: called with sentences for the user: which importer and why, and what it found out.
        progress: entered while a dump is converted; gives what takes bytes read and bytes to read.
        logs_alone: True to take logged metrics without rollouts.

    Raises:
        InputError: if nothing is found or it cannot be read.
    """
    if STANDARD_INPUT in paths:
        with standard_input() as kept:
            named = [kept if each == STANDARD_INPUT else each for each in paths]
            with open_any(
                named, trainer=trainer, options=options, tell=tell, progress=progress, logs_alone=logs_alone
            ) as run:
                yield run
        return
    given = paths
    if not options.asked_for:
        with _looking(paths):
            paths = with_nested(paths, _is_run, tell)
    logs = logs_of(paths) if logs_alone and not options.asked_for else ()
    if logs:
        kinds = ", ".join(dict.fromkeys(kind_of(Path(log.path)) or "a table of metrics" for log in logs))
        tell(f"logged metrics without rollouts ({kinds})")
        notes = ReaderNotes()
        metrics = read_logs(logs, notes)
        writer = trainer_from_metric_names(metrics.names())
        if writer is None and not writers(metrics.names()):
            _tell_generic_names(metrics.names(), notes)
        stated = stated_beside(tuple(dict.fromkeys((*given, *paths))), logs, tell)
        # Of trainers that share their names, what is stated decides.
        writer = next((TRAINERS[one.trainer] for one in stated if one.trainer in writers(metrics.names())), writer)
        metadata = completed(RunMetadata(), stated, tell, writer).with_total_steps(metrics.total_steps)
        yield Run((), metadata, metrics, logs, notes=notes)
        return
    found = detect_dump(paths, options)
    if found is None:
        with ExitStack() as stack:
            yield stack.enter_context(_with_logs(paths, trainer, tell, options))
        return
    tell(f"read with the importer {found.importer.name}: {found.why}")
    with scratch_folder() as folder:
        path = folder / "run.parquet"
        with progress() as advance:
            sink = _converted(found, path, options, advance)
        for sentence in sink.told:
            tell(sentence)
        name = " ".join(source.name for source in found.sources)
        file = read_footer(Source(str(path), name), trainer, ALIASES)
        logged = [Source(str(each), name) for each in [metrics_path(path)] if each.exists()]
        metrics = read_metrics(logged, sink.note)
        yield Run([file], file.metadata, metrics, found.sources, found.logs, sink.note)

"""One way for every command to open what people have: run files, dumps, logs, folders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from rolloutdoctor.importers.journal import RecordingJournal
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.importers.reading.notebooks import read_notebook
from rolloutdoctor.importers.unknown import not_understood, only_file
from rolloutdoctor.io.locations.paths import METRIC_SUFFIXES, Source, call, expand, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics, differences, read_metrics
from rolloutdoctor.io.parquet.files import read_footer
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.io.run import Run, open_run
from rolloutdoctor.io.standard_input import STANDARD_INPUT, standard_input
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.metric_names.table import writers
from rolloutdoctor.metric_names.training_kind import LOSSES, NOT_CHECKED, training_kind
from rolloutdoctor.opening.counted_shares import GROUPS, with_shares
from rolloutdoctor.opening.dumps import ConvertOptions, Detected, converted, detect_dump
from rolloutdoctor.opening.filled_evaluations import without_filled
from rolloutdoctor.opening.logs import at_steps_of, logs_of, read_logs, tell_generic_names
from rolloutdoctor.opening.nested import holds_run, looking, with_nested
from rolloutdoctor.opening.sibling_logs import are_of_one_training
from rolloutdoctor.opening.stated.options import ReadLog, Stated
from rolloutdoctor.opening.stated_options import completed, newest_state, options_said, stated_beside
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.table import ALIASES, TRAINERS, trainer_from_metric_names


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
        with standard_input() as input_file:
            named = [input_file if each == STANDARD_INPUT else each for each in paths]
            with open_any(
                named, trainer=trainer, options=options, tell=tell, progress=progress, logs_alone=logs_alone
            ) as run:
                yield run
        return
    asked = paths
    if not options.asked_for:
        with looking(paths):
            paths = with_nested(paths, _is_run, tell, are_of_one_training)
    logs = logs_of(paths) if logs_alone and not options.asked_for else ()
    if logs:
        yield _of_logs(logs, tuple(dict.fromkeys((*asked, *paths))), tell)
        return
    dump = detect_dump(paths, options)
    if dump is None:
        with ExitStack() as stack:
            yield stack.enter_context(_with_logs(paths, trainer, tell, options))
        return
    tell(f"read with the importer {dump.importer.name}: {dump.why}")
    with scratch_folder() as folder:
        path = folder / "run.parquet"
        with progress() as advance:
            sink = converted(dump, path, options, advance)
        for sentence in sink.told:
            tell(sentence)
        name = " ".join(source.name for source in dump.sources)
        file = read_footer(Source(str(path), name), trainer, ALIASES)
        logged = [Source(str(each), name) for each in [metrics_path(path)] if each.exists()]
        metrics = read_metrics(logged, sink.note)
        yield Run([file], file.metadata, metrics, dump.sources, dump.logs, sink.note)


_OF_SUPERVISED = frozenset({"loss", "grad_norm", "learning_rate"})
"""What the transformers Trainer logs of any training; one that trains a policy logs its rewards on the same line."""


def _of_this_kind(stated: list[Stated], metrics: LoggedMetrics, tell: Callable[[str], None]) -> list[Stated]:
    """Return options but for those beside the log of another training, such as the fine-tuning before it."""
    names, environment = metrics.names(), metrics.facts.environment
    kind = training_kind(names, environment, has_held_out_loss=metrics.has_held_out_loss)
    losses = [loss for key in metrics.steps() if (loss := metrics.at(key).get("loss")) is not None]
    # The loss of a policy may be below 0.
    is_supervised = kind == LOSSES and names >= _OF_SUPERVISED and min(losses, default=0.0) >= 0
    if not is_supervised and kind not in NOT_CHECKED - {LOSSES}:
        return stated
    for config in stated:
        if config.trainer is not None:
            tell(f"{config.origin}: options of {TRAINERS[config.trainer].title} beside a log of {kind}: not used")
    return [config for config in stated if config.trainer is None]


def _as_read(metrics: LoggedMetrics) -> ReadLog:
    """Return what a log says of its options."""
    return ReadLog(writers(metrics.names()), metrics.names(), metrics.facts.begins, is_alone=not metrics.facts.part)


def _of_logs(logs: Sequence[Source], paths: Sequence[str], tell: Callable[[str], None]) -> Run:
    """Read logs without rollouts as a run, with the options that lie beside these paths."""
    kinds = ", ".join(dict.fromkeys(kind_of(Path(log.path)) or "a table of metrics" for log in logs))
    tell(f"logged metrics without rollouts ({kinds})")
    notes = ReaderNotes()
    try:
        metrics = without_filled(read_logs(logs, notes), notes)
    except InputError as error:
        # A notebook that was cleared has its code.
        code = [Path(log.path) for log in logs if len(logs) == 1 and read_notebook(Path(log.path)) is not None]
        remark = "; ".join(filter(None, map(options_said, code)))
        raise (InputError(f"{error}; {remark}") if remark else error) from None
    writer = trainer_from_metric_names(metrics.names())
    if writer is None and not writers(metrics.names()):
        tell_generic_names(metrics.names(), notes)
    stated = _of_this_kind(stated_beside(paths, logs, tell, _as_read(metrics)), metrics, notes)
    # Of trainers that share their names, what is stated decides.
    writer = next((TRAINERS[config.trainer] for config in stated if config.trainer in writers(metrics.names())), writer)
    metadata = completed(RunMetadata(), stated, tell, writer).with_total_steps(metrics.facts.total_steps)
    return Run((), metadata, with_shares(metrics, metadata.config.get(GROUPS), notes), logs, notes=notes)


@contextmanager
def _with_logs(
    paths: Sequence[str], trainer: str | None, tell: Callable[[str], None], options: ConvertOptions
) -> Iterator[Run]:
    """Open run files, and the logs of numbers and recordings that were not closed that were given with them.

    Raises:
        InputError: if nothing is found or it cannot be read.
    """
    with looking(paths):
        paths = [each for path in paths for each in _named_apart(path)]
        log_paths = [path for path in paths if Path(path).is_file() and _is_other_log(path)]
    files = [path for path in paths if path not in log_paths]
    for path in files:
        why = not_understood(Path(path), options_said)
        if why is not None:
            raise InputError(f"{Source.of(path).name}: {why}")
    expanded = expand(files)
    with ExitStack() as stack:
        closed_journals: dict[str, str] = {}
        for journal in expanded.journals:
            tell(f"{journal.name}: a recording that was not closed")
            file = stack.enter_context(scratch_folder()) / "run.parquet"
            stack.enter_context(call(str(file), journal.name))
            stack.enter_context(call(str(metrics_path(file)), journal.name))
            sink = converted(Detected(RecordingJournal(), "", (journal,), ()), file, options, None)
            for sentence in sink.told:
                tell(sentence)
            closed_journals[journal.path] = str(file)
        if closed_journals:
            # In the order of the ranks.
            sources = sorted((*expanded.files, *expanded.journals), key=lambda source: natural_key(source.name))
            files = [closed_journals.get(source.path, source.path) for source in sources] + [
                each.path for each in expanded.metrics
            ]
        # Not kept here: what is open is closed when nobody has the run any more.
        yield _completed_by(
            log_paths, open_run(files, trainer=trainer, aliases=ALIASES, origins=expanded.journals), tell
        )


def _completed_by(log_paths: Sequence[str], run: Run, tell: Callable[[str], None]) -> Run:
    """Return a run with the logs of numbers that were given with it."""
    if log_paths:
        logs = tuple(map(Source.of, log_paths))
        tell(f"logged metrics from {', '.join(dict.fromkeys(str(kind_of(Path(path))) for path in log_paths))}")
        metrics = without_filled(read_logs(logs, run.notes), run.notes)
        metrics = with_shares(metrics, run.metadata.config.get(GROUPS), run.notes)
        run_metrics = [("the run", run.metrics)]
        metrics = at_steps_of(metrics, logs[0].name, run_metrics, run.notes)
        for key, name, value, last in differences(metrics, run.metrics):
            run.notes.repeated(f"{logs[0].name} and the run", key, name, value, last)
        run = run.with_logs(metrics, logs)
        if not run.metadata.config:
            writer = trainer_from_metric_names(run.metrics.names())
            run.metadata = completed(run.metadata, stated_beside((), logs, tell, _as_read(metrics)), tell, writer)
        run.metadata = run.metadata.with_total_steps(metrics.facts.total_steps)
    return run


def _named_apart(path: str) -> list[str]:
    """The files of a folder by their names where one of its Parquet files is a log; else the path as it is."""
    if not Path(path).is_dir():
        return [path]
    try:
        expanded = expand([path])
    except InputError:
        why = not_understood(Path(path)) or only_file(Path(path), options_said)
        if why is None:
            raise
        raise InputError(f"{Source.of(path).name}: {why}") from None
    is_log = [kind_of(Path(file.path)) is not None for file in expanded.files]
    if all(is_log) or not any(is_log):
        return [path]
    return [source.path for source in (*expanded.files, *expanded.journals, *expanded.metrics)]


def _is_other_log(path: str) -> bool:
    """True if a file is a log of numbers, and not a table of metrics, which belongs to a run file."""
    return not path.endswith(METRIC_SUFFIXES) and kind_of(Path(path)) is not None


def _is_run(path: str) -> bool:
    return holds_run(Path(path)) or newest_state(Path(path)) is not None or any(Path(path).glob("*.journal"))

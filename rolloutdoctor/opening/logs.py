"""Read logs of numbers, one or several of one run."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.table import detect
from rolloutdoctor.io.locations.paths import METRIC_SUFFIXES, Source
from rolloutdoctor.io.metrics import (
    LogFacts,
    LoggedMetrics,
    check_one_log,
    contradiction,
    differences,
    joined,
    read_metrics,
    steps_of_lines,
    values_by_step,
    without_excerpts,
)
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.metric_names.generic import is_held_out
from rolloutdoctor.metric_names.table import namesakes, taken_names
from rolloutdoctor.opening.nested import looking
from rolloutdoctor.opening.stated_options import newest_state
from rolloutdoctor.results.errors import InputError, SeveralRunsError
from rolloutdoctor.trainers.table import trainer_from_metric_names


def logs_of(paths: Sequence[str]) -> tuple[Source, ...]:
    """Return the logs of numbers that `paths` name, a folder by those in it; none if something else is there too."""
    with looking(paths):
        return _logs_of(paths)


def _logs_of(paths: Sequence[str]) -> tuple[Source, ...]:
    logs: list[str] = []
    for path in paths:
        place = Path(path)
        if is_log(place):
            inside = [path]
        elif place.is_dir() and detect(place) is None and not any(_is_run_file(each) for each in place.iterdir()):
            inside = sorted(str(each) for each in place.iterdir() if each.is_file() and is_log(each))
            state = None if inside else newest_state(place)
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
    return of_one_run(tables_of(logs, notes), notes)


def tables_of(logs: Sequence[Source], notes: ReaderNotes) -> list[tuple[str, LoggedMetrics]]:
    """Read each of some logs, under its name; of several, what a file of evaluations has is no metric of the training.

    Raises:
        InputError: if one cannot be read.
    """
    of = ["eval/" if len(logs) > 1 and is_of_evaluations(log.name) else "" for log in logs]
    return [(log.name, _read_log(log, notes, prefix)) for log, prefix in zip(logs, of, strict=True)]


def is_of_evaluations(path: str) -> bool:
    """Tell a file of evaluations by its name.

    >>> is_of_evaluations("logs/eval_log.jsonl"), is_of_evaluations("evaluator.log")
    (True, False)
    """
    return is_held_out(f"{Path(path).stem}_")


def of_one_run(tables: list[tuple[str, LoggedMetrics]], notes: ReaderNotes) -> LoggedMetrics:
    """Return logs as one, as `read_logs` does, which has read them."""
    first = tables[0][0]
    total = max((table.facts.total_steps for _, table in tables if table.facts.total_steps), default=None)
    tables = [(name, at_steps_of(table, name, tables, notes)) for name, table in _of_steps(tables, notes)]
    check_one_log(tables)
    named = [(name, writers) for name, table in tables if (writers := _writers_of(table))]
    for second, writers in named[1:]:
        if {*writers}.isdisjoint(named[0][1]):
            raise SeveralRunsError(
                f"{named[0][0]} and {second} are not of one run: their metrics are those of {named[0][1][0]} and "
                f"{writers[0]}; give one of them, or check them with --each"
            )
    log = joined(without_excerpts([table for _, table in tables]))
    for name, table in reversed(tables[:-1]):
        for key, metric, value, last in differences(table, log):
            notes.repeated(f"{name} and {tables[-1][0]}", key, metric, value, last)
    facts = [table.facts for _, table in tables]
    log.facts = replace(
        facts[0] if len(facts) == 1 else LogFacts(),
        total_steps=total,
        counted_steps=all(of_log.counted_steps for of_log in facts),
        environment=next((of_log.environment for of_log in facts if of_log.environment), ""),
    )
    if not any(log.at(key) for key in log.steps()):
        raise InputError(f"{first}: no number was logged there")
    return log


def _of_steps(tables: list[tuple[str, LoggedMetrics]], tell: Callable[[str], None]) -> list[tuple[str, LoggedMetrics]]:
    """Return logs but for those with a line for each epoch of another one, which has the steps of the epochs."""
    epochs = [
        (
            name,
            len(
                {value for key in table.steps() if (value := table.at(key).get("epoch")) is not None and not value % 1}
            ),
            table,
        )
        for name, table in tables
    ]
    remaining = []
    for name, table in tables:
        count = len(table.lines)
        stepped = [
            other
            for other, passed, longer in epochs
            if table.counts_lines and 1 < count == passed and len(longer.lines) >= 2 * count
        ]
        if stepped:
            tell(f"{name}: its {count} lines are of the epochs of {stepped[0]}, which has their steps: not read")
        else:
            remaining.append((name, table))
    return remaining


def at_steps_of(
    table: LoggedMetrics, name: str, others: Iterable[tuple[str, LoggedMetrics]], tell: Callable[[str], None]
) -> LoggedMetrics:
    """Return a log under the steps of another one that holds the same lines, where it counts its own from 1."""
    for other, lines in others:
        steps = steps_of_lines(table, lines)
        if steps is not None:
            tell(f"{name}: its lines are those of {other}, and take their steps")
            return table.at_steps(steps)
    return table


def _writers_of(table: LoggedMetrics) -> tuple[str, ...]:
    """Return the trainer that logged a table, or those that would name its metrics so."""
    trainer = trainer_from_metric_names(table.names())
    return namesakes(table.names()) if trainer is None else (trainer.name,)


def are_apart(left: LoggedMetrics, right: LoggedMetrics) -> bool:
    """Tell whether two logs are of two runs: of two trainers, or with two values of one metric at a step."""
    writers = [{*_writers_of(table)} for table in (left, right)]
    if all(writers) and writers[0].isdisjoint(writers[1]):
        return True
    is_same = any(steps_of_lines(*pair) is not None for pair in ((left, right), (right, left)))
    return not is_same and contradiction(left, right) is not None


def _read_log(log: Source, notes: ReaderNotes, prefix: str) -> LoggedMetrics:
    if log.path.endswith(METRIC_SUFFIXES):
        return read_metrics([log], notes)
    of_log = LogNotes(notes)
    entries = (
        (StepKey(step, split), {f"{prefix}{name}": value for name, value in numbers.items()} if prefix else numbers)
        for step, split, numbers in read_log(log, of_log)
    )
    values = values_by_step(entries, log.name, notes)
    file = of_log.file or log.path
    others = tuple(f"{file}/{number}" for number in of_log.others if Path(file).is_file())
    facts = LogFacts(of_log.total_steps, of_log.counted_steps, of_log.environment, of_log.begins, of_log.part, others)
    return LoggedMetrics(values, facts=facts)


def tell_generic_names(names: Collection[str], tell: Callable[[str], None]) -> None:
    """Say which names are taken for what, where they are no trainer's that is known."""
    taken = [f"{name} as {title}" for name, title in taken_names(names).items()]
    if taken:
        tell(f"no known trainer uses these metric names; read {', '.join(taken)}")


def is_log(path: Path) -> bool:
    """Tell a log of numbers, or a table of metrics."""
    return (path.name.endswith(METRIC_SUFFIXES) and path.is_file()) or kind_of(path) is not None


def _is_run_file(path: Path) -> bool:
    return path.suffix == ".parquet" and not is_log(path)

"""Metrics that the trainer logged beside the rollouts: one number per step, split and name."""

import io
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import pyarrow as pa
from pyarrow import types

from rolloutdoctor.data.schema import METRIC_COLUMNS
from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.data.windows import Window, windows_of
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.locations.small_files import once
from rolloutdoctor.io.locations.stores import open_bytes
from rolloutdoctor.io.parquet.cells import Place, evals, float64, identifiers, step_numbers
from rolloutdoctor.io.parquet.files import check_size, open_parquet, reading
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.ops.logged_digits import Digits, digits_by_name, of_means, rounding_of
from rolloutdoctor.results.errors import DataError, InputError, SchemaError, SeveralRunsError

_EXPECTED = {"step": "int64", "split": "string", "name": "string", "value": "float64"}


@dataclass(frozen=True)
class LogFacts:
    """What a log says of its run beside the values.

    Attributes:
        total_steps: optimizer steps that the run was planned for; None if its log does not say.
        counted_steps: whether the lines of the log say no step, so that they are numbered from 1.
        environment: of Gymnasium that the text of the log names; empty if it names none.
        begins: of a text, the line after which the run that was read begins, and that of its first number; of a
            notebook, the cells of these lines.
        part: which of the runs in its log it is, where there are several.
        others: paths of the other runs in its log, the longest first, where no run was asked for.
    """

    total_steps: int | None = None
    counted_steps: bool = False
    environment: str = ""
    begins: tuple[int, int] | None = None
    part: str = ""
    others: tuple[str, ...] = ()


class LoggedMetrics:
    """Metrics by step and split; false if there are none.

    Attributes:
        left_out: names that were logged, but of which values were left out by `by_batch`.
        windows: the steps that the values left out are means over, in order.
        lines: steps of training at which something was logged.
        facts: what the log says beside the values.
    """

    def __init__(
        self,
        values: Mapping[StepKey, Mapping[str, float]] | None = None,
        left_out: frozenset[str] = frozenset(),
        windows: tuple[Window, ...] = (),
        digits: Mapping[str, tuple[Digits, ...]] | None = None,
        lines: frozenset[int] | None = None,
        facts: LogFacts | None = None,
    ) -> None:
        self._values = dict(values or {})
        self.left_out, self.windows, self._digits, self.facts = left_out, windows, digits, facts or LogFacts()
        self.lines = frozenset(key.step for key in self._values if key.split == TRAIN) if lines is None else lines

    def at(self, key: StepKey) -> Mapping[str, float]:
        """Return the metrics of one step and split by name; empty if none were logged."""
        return self._values.get(key, {})

    def steps(self) -> list[StepKey]:
        """Return the steps and splits at which something was logged, in order."""
        return list(self._steps)

    @cached_property
    def _steps(self) -> tuple[StepKey, ...]:
        return tuple(sorted(self._values))

    def names(self) -> frozenset[str]:
        """Return every name that was logged at least once."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset[str]().union(*self._values.values())

    @cached_property
    def has_held_out_loss(self) -> bool:
        """True if an evaluation has a loss."""
        return any(key.split != TRAIN and "loss" in values for key, values in self._values.items())

    @cached_property
    def counts_lines(self) -> bool:
        """True if the steps of training are 1, 2, 3 and so on."""
        return self.lines == set(range(1, len(self.lines) + 1))

    def interval(self, split: str) -> int | None:
        """Return the usual distance between two logged steps of a split; None below two steps.

        A trainer that logs every third step logs the last one, too, wherever it ends.
        """
        steps = [key.step for key in self._steps if key.split == split]
        distances = Counter(later - earlier for earlier, later in pairwise(steps))
        return max(distances, key=lambda distance: (distances[distance], distance), default=None)

    def digits(self) -> Mapping[str, tuple[Digits, ...]]:
        """Return what the values of each metric may have been rounded to; metrics that were not are left out."""
        return self._rounded if self._digits is None else self._digits

    @cached_property
    def _rounded(self) -> Mapping[str, tuple[Digits, ...]]:
        return digits_by_name(self._numbers())

    def _numbers(self) -> dict[str, list[float]]:
        values: dict[str, list[float]] = {}
        for metrics in self._values.values():
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return values

    def by_batch(
        self, interval: int, span: int, instant: Collection[str], is_made_once: Callable[[str], bool]
    ) -> "LoggedMetrics":
        """Return the training metrics as the rows of a generated batch give them; those of evaluations as they are.

        A line that is a mean over several optimizer steps is no value of one of them, and a batch that serves several
        has a line at each. With a line for every optimizer step, what is made in the update becomes its mean over the
        steps of the batch, under the first of them; else all becomes means over windows.

        Args:
            interval: optimizer steps from one line to the next.
            span: optimizer steps of one pass over a generated batch.
            instant: names of metrics that are of the logged step alone.
            is_made_once: tells those that are made once for a generated batch.
        """
        lines = {key.step: metrics for key, metrics in self._values.items() if key.split == TRAIN}
        values = {key: metrics for key, metrics in self._values.items() if key.split != TRAIN}
        windows: tuple[Window, ...] = ()
        others = {name for metrics in lines.values() for name in metrics if name not in instant}
        if interval > 1:
            windows = windows_of(
                {step: {name: metrics[name] for name in metrics if name in others} for step, metrics in lines.items()},
                interval,
                span,
                is_made_once,
            )
        for step, metrics in lines.items():
            line_values = {name: value for name, value in metrics.items() if name in instant}
            if interval == 1:
                # Of more steps than there are lines one is missing, whatever an option says of their number.
                served = [lines.get(step + later, {}) for later in range(min(span, len(lines) + 1))]
                line_values |= {name: metrics[name] for name in metrics if is_made_once(name)}
                line_values |= {
                    name: math.fsum(line[name] for line in served) / span
                    for name in others.difference(line_values)
                    if all(name in line for line in served)
                }
            values[StepKey(step, TRAIN)] = {
                name: line_values[name] for name in (*metrics, *line_values) if name in line_values
            }
        left = frozenset(others) if interval > 1 else frozenset[str]()
        digits = self.digits() if span == 1 else of_means(self.digits(), self._numbers())
        return LoggedMetrics(values, left, windows, digits, self.lines)

    def completed_by(self, other: "LoggedMetrics") -> "LoggedMetrics":
        """Return these metrics with the values of another log where they have none; see `joined`."""
        return joined([other, self])

    def at_steps(self, steps: Sequence[int]) -> "LoggedMetrics":
        """Return these metrics, whose lines are numbered from 1, under other steps; an evaluation stays at its line."""
        return LoggedMetrics({StepKey(steps[key.step], key.split): metrics for key, metrics in self._values.items()})

    def with_values(self, more: Mapping[StepKey, Mapping[str, float]]) -> "LoggedMetrics":
        """Return these metrics with further values of some steps."""
        if not more:
            return self
        values = {key: {**metrics, **more.get(key, {})} for key, metrics in self._values.items()}
        return LoggedMetrics(values, self.left_out, self.windows, self._digits, self.lines, self.facts)

    def without(self, places: Mapping[str, Collection[StepKey]]) -> "LoggedMetrics":
        """Return these metrics without some values: of each name those of some steps."""
        values = {
            key: {name: value for name, value in metrics.items() if key not in places.get(name, ())}
            for key, metrics in self._values.items()
        }
        return LoggedMetrics(values, self.left_out, self.windows, self._digits, self.lines, self.facts)

    def __contains__(self, key: StepKey) -> bool:
        return key in self._values

    def __bool__(self) -> bool:
        return bool(self._values)


def values_by_step(
    entries: Iterable[tuple[StepKey, Mapping[str, float | None]]], file: str, notes: ReaderNotes
) -> dict[StepKey, dict[str, float]]:
    """Return what a log holds by step and split, without nulls.

    Where a step, split and name occur twice, the last wins: a trainer that resumed from a checkpoint logs some steps
    again. A note says so where the values differ.
    """
    values: dict[StepKey, dict[str, float]] = {}
    for key, metrics in entries:
        of_step = values.setdefault(key, {})
        for name, value in metrics.items():
            if value is None:
                continue
            before = of_step.get(name, value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                notes.repeated(file, key, name, before, value)
            of_step[name] = value
    return values


def read_metrics(sources: Sequence[Source], notes: ReaderNotes | None = None) -> LoggedMetrics:
    """Read metrics tables, Parquet or JSON Lines, with the columns `step`, `split`, `name` and `value`.

    An absent `split` means train; a null value means not logged. Where a step, split and name occur twice, the last
    wins.

    Args:
        sources: the tables.
        notes: takes what was left out; None: it is dropped.

    Raises:
        InputError: if a table cannot be read or breaks that contract; the message names the file and the row.
    """
    notes = ReaderNotes() if notes is None else notes
    values: dict[StepKey, dict[str, float]] = {}
    for source in sources:
        # The name may be that of the dump from which the table was made.
        is_json = source.name.endswith(".jsonl") and not source.path.endswith(".parquet")
        rows = _json_rows(source) if is_json else _parquet_rows(source)
        table = values_by_step(((key, {name: value}) for key, name, value in rows), source.name, notes)
        for key, of_step in table.items():
            values.setdefault(key, {}).update(of_step)
    return LoggedMetrics(values)


_RESUMED = 0.5
"""Two tables of which at most this share of the shorter one's steps is in both may be a run that was resumed."""


def joined(tables: Sequence[LoggedMetrics]) -> LoggedMetrics:
    """Return several logs as one: where a step, split and name occur twice, the last one wins.

    A metric of which several logs give values may be rounded to what any of them is.
    """
    values: dict[StepKey, dict[str, float]] = {}
    for table in tables:
        for key in table.steps():
            values.setdefault(key, {}).update(table.at(key))
    taken: dict[StepKey, set[str]] = {}
    sources: dict[str, list[LoggedMetrics]] = {}
    for table in reversed(tables):
        more = set[str]()
        for key in table.steps():
            before = taken.setdefault(key, set())
            more |= table.at(key).keys() - before
            before.update(table.at(key))
        for name in more:
            sources.setdefault(name, []).append(table)
    shared = {name: logs for name, logs in sources.items() if len(logs) > 1}
    joined_log = LoggedMetrics(values)
    if not shared:
        return joined_log
    digits = dict(joined_log.digits())
    for name, logs in shared.items():
        either = [form for log in (*logs, joined_log) for form in log.digits().get(name, ())]
        if either:
            digits[name] = tuple(dict.fromkeys(either))
    return LoggedMetrics(values, digits=digits)


def without_excerpts(tables: Sequence[LoggedMetrics]) -> list[LoggedMetrics]:
    """Return several logs, each without the metrics that another has at all its steps and at more, as a console has."""
    steps = [
        {name: {key for key in table.steps() if name in table.at(key)} for name in table.names()} for table in tables
    ]
    remaining = []
    for table, own_steps in zip(tables, steps, strict=True):
        lesser = {name for name in own_steps if any(own_steps[name] < other.get(name, set()) for other in steps)}
        values = {
            key: {name: value for name, value in table.at(key).items() if name not in lesser} for key in table.steps()
        }
        remaining.append(LoggedMetrics(values) if lesser else table)
    return remaining


def check_one_log(tables: Sequence[tuple[str, LoggedMetrics]]) -> None:
    """Refuse tables of metrics that are of different runs: most of their steps are the same, and their values are not.

    Tables are compared where a step has two values of one metric, and with no others.

    Raises:
        SeveralRunsError: if two of them are.
    """
    if len(tables) < 2:
        return
    by_value: dict[tuple[StepKey, str], dict[float, list[int]]] = {}
    for number, (second, other) in enumerate(tables):
        differing = set[int]()
        for key in other.steps():
            for name, value in other.at(key).items():
                before = by_value.setdefault((key, name), {})
                if before and (value not in before or len(before) > 1):
                    differing.update(*(numbers for its, numbers in before.items() if its != value))
                before.setdefault(value, []).append(number)
        for first, log in (tables[place] for place in sorted(differing)):
            conflict = contradiction(log, other)
            if conflict is not None:
                key, name = conflict
                raise SeveralRunsError(
                    f"{first} and {second} are not of one run: {name} at step {key.step} is {log.at(key)[name]:g} in "
                    f"the first and {other.at(key)[name]:g} in the second; give one of them, or check them with --each"
                )


_FEWEST_LINES = 2
"""Lines of two logs that have to be the same, one after another, before one of them takes the steps of the other."""

_MOST_COMPARED = 1_000_000
"""Pairs of lines."""


def steps_of_lines(log: LoggedMetrics, other: LoggedMetrics) -> list[int] | None:
    """Return the step of each line of a log that counts its lines, by a log that holds the same lines with their steps.

    Without a progress bar a console says no step, so that its lines count from 1 whatever lies between two of them.

    Returns:
        The step before the first line, and of each line; None if `log` does not count from 1 or `other` does, or if
        their lines differ.
    """
    count = max(log.lines, default=0)
    # Where all lines have steps of their own nothing is compared, however many logs there are.
    if count < _FEWEST_LINES or not log.counts_lines or other.counts_lines:
        return None
    other_steps, interval = sorted(other.lines), other.interval(TRAIN)
    if interval is None or any(key.step > count for key in log.steps()):
        return None
    digits = log.digits(), other.digits()
    compared = 0
    for first in range(len(other_steps) - _FEWEST_LINES + 1):
        length = min(count, len(other_steps) - first)
        for place in range(length):
            compared += 1
            lines = log.at(StepKey(place + 1, TRAIN)), other.at(StepKey(other_steps[first + place], TRAIN))
            if not _agree(*lines, digits):
                break
        else:
            steps = [
                other_steps[first - 1] if first else max(other_steps[0] - interval, 0),
                *other_steps[first : first + length],
            ]
            return steps + [steps[-1] + interval * further for further in range(1, count - length + 1)]
        # Where lines repeat themselves each begins as the others do; and no step is theirs for sure.
        if compared > _MOST_COMPARED:
            return None
    return None


def _agree(
    mine: Mapping[str, float], its: Mapping[str, float], digits: tuple[Mapping[str, tuple[Digits, ...]], ...]
) -> bool:
    """Tell whether two lines hold the same numbers, of which one at least is not whole."""
    shared = mine.keys() & its.keys()
    return any(mine[name] % 1 > 0 for name in shared) and not any(_differ(name, mine, its, digits) for name in shared)


def contradiction(left: LoggedMetrics, right: LoggedMetrics) -> tuple[StepKey, str] | None:
    """Return where two logs of one run would contradict each other; None where they may be of one.

    A log that was rounded, on a console, contradicts none by its digits.
    """
    shared = [key for key in left.steps() if key in right]
    if len(shared) <= _RESUMED * min(len(left.steps()), len(right.steps())):
        return None
    return next(((key, name) for key, name, _, _ in differences(left, right)), None)


def differences(left: LoggedMetrics, right: LoggedMetrics) -> Iterator[tuple[StepKey, str, float, float]]:
    """Yield where two logs have values of one metric that differ by more than their rounding, in the order of steps."""
    for key in left.steps():
        mine, its = left.at(key), right.at(key)
        # Mostly all are the same, and what they were rounded to need not be known.
        for name in sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name]):
            if _differ(name, mine, its, (left.digits(), right.digits())):
                yield key, name, mine[name], its[name]


def _differ(
    name: str,
    mine: Mapping[str, float],
    its: Mapping[str, float],
    digits: tuple[Mapping[str, tuple[Digits, ...]], ...],
) -> bool:
    """Tell whether the values of a metric in two logs are further apart than their rounding."""
    a, b = mine[name], its[name]
    # Of one value rounded alike nothing else comes out.
    radii = {rounding_of(each, name, value) for each, value in zip(digits, (a, b), strict=True)}
    reach = sum(radii) if len(radii) > 1 else 0.0
    # Some logs keep single precision.
    return abs(a - b) > reach + _SINGLE * max(abs(a), abs(b)) or math.isnan(a) != math.isnan(b)


_SINGLE = 2.0**-23


def _parquet_rows(source: Source) -> Iterator[tuple[StepKey, str, float]]:
    with open_parquet(source) as parquet:
        with reading(source.name, "the footer"):
            schema = parquet.schema_arrow
            names = schema.names
        _check_schema(schema, names, source.name)
        check_size(source, parquet.metadata, METRIC_COLUMNS)
        with reading(source.name, "the table"):
            table = parquet.read(columns=[name for name in METRIC_COLUMNS if name in names])
    places = {name: Place(source.name, name, range(table.num_rows)) for name in table.column_names}
    steps = step_numbers(table.column("step"), places["step"]).tolist()
    logged = identifiers(table.column("name"), places["name"]).to_pylist()
    is_eval = evals(table.column("split"), places["split"]).tolist() if "split" in places else [False] * table.num_rows
    is_null = table.column("value").is_null().to_pylist()
    for row, value in enumerate(float64(table.column("value")).tolist()):
        if not is_null[row]:
            yield StepKey(steps[row], EVAL if is_eval[row] else TRAIN), logged[row], value


def _check_schema(schema: pa.Schema, names: list[str], file: str) -> None:
    for name, expected in _EXPECTED.items():
        if names.count(name) != 1:
            if name == "split" and not names.count(name):
                continue
            problem = "two columns are called" if names.count(name) else "no column"
            raise SchemaError(f"{file}: {problem} {name}; logged metrics have the columns {', '.join(METRIC_COLUMNS)}")
        type_ = schema.field(name).type
        value_type = type_.value_type if types.is_dictionary(type_) else type_
        is_text = types.is_string(value_type) or types.is_large_string(value_type) or types.is_string_view(value_type)
        is_number = types.is_integer(type_) or (name == "value" and types.is_floating(type_))
        if not (is_text if expected == "string" else is_number):
            raise SchemaError(
                f"{file}: column {name} is {type_} where {expected} was expected; write it with that type"
            )


def _json_rows(source: Source) -> Iterator[tuple[StepKey, str, float]]:
    try:
        # A byte order mark is what some editors put before the first line.
        with open_bytes(source.path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = _json_row(line, f"{source.name}, line {number}")
                    if row is not None:
                        yield row
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise InputError(f"{source.name}: not UTF-8 text; write one JSON object per line") from None


def _json_row(line: str, where: str) -> tuple[StepKey, str, float] | None:
    try:
        row = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise InputError(
            f"{where}: not a JSON object, or one with a key twice; "
            'write {"step": 0, "name": "kl", "value": 0.1} on each line'
        )
    step, name, value, split = row.get("step"), row.get("name"), row.get("value"), row.get("split", TRAIN)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        raise DataError(f"{where}: step {step!r} where an integer of 0 or more was expected; log the optimizer step")
    if not isinstance(name, str):
        raise DataError(f"{where}: name {name!r} where a string was expected; log the metric's name")
    if split not in (TRAIN, EVAL):
        raise DataError(f"{where}: split {split!r} where 'train' or 'eval' was expected; rename it, or drop those rows")
    if value is None and "value" in row:
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError
        return StepKey(step, split), name, float(value)
    except (TypeError, OverflowError):
        raise DataError(f"{where}: value {value!r:.40} where a number was expected; log it as a float") from None

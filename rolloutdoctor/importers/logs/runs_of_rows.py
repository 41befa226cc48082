"""From the rows of a file to one row for each step of one of its runs."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.counters import through_epochs
from rolloutdoctor.importers.logs.kinds_of_rows import steps_by_place
from rolloutdoctor.importers.logs.notes import LogNotes, RunOfText
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.parts_of_steps import Row, means_of_steps, values_of_row
from rolloutdoctor.importers.logs.printed import Printed
from rolloutdoctor.importers.logs.printed_runs import runs_in
from rolloutdoctor.importers.logs.rows import RUNS, STEPS, counter_of, entries_of, is_long, step_of
from rolloutdoctor.metric_names.generic import is_held_out
from rolloutdoctor.metric_names.table import metric_quantities

_SUMMARIES = frozenset(
    {"summary", "final", "total", "totals", "overall", "sum", "mean", "average", "avg", "end", "done"}
)
"""Words of a row that is of no step, but of the run."""

_MOST, _FEWEST = 3, 5
"""Rows at the end that may be of the run, and rows before them."""

_SUM, _MEAN = 1e-2, 1e-3
"""How far a rounded sum may be from that of the numbers, as a share of it, and a mean, as one of their range."""


def entries_of_rows(rows: Sequence[Row], notes: LogNotes, *, is_printed: bool = False) -> Iterator[Entry]:
    """Yield what the rows of one run log, a row for each of its steps.

    Args:
        rows: of a file, in their order.
        notes: says which run is wanted, and takes what is said of the others, and of what is left out.
        is_printed: whether the transformers Trainer may have logged them.
    """
    for row, where in _of_one_run(_with_steps(rows, notes), notes):
        yield from entries_of(row, where, notes, is_printed=is_printed)


def _of_one_run(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    named = _name_of_run(rows)
    if named is None:
        counted = [_as_printed(row) for row, _ in rows]
        records = through_epochs(counted)
        rows = [
            (row if record is printed else {**row, printed.counter: record.step}, where)
            for (row, where), printed, record in zip(rows, counted, records, strict=True)
        ]
        run_texts = runs_in([replace(record, counter="") for record in records])
    else:
        runs: dict[str, list[Row]] = {}
        for row, where in rows:
            cells = {name: value for name, value in row.items() if name != named}
            runs.setdefault(f"{named}={row[named]}", []).append((cells, where))
        rows = [row for of_run in runs.values() for row in of_run]
        ends = list(accumulate(map(len, runs.values())))
        run_texts = [RunOfText(end - len(runs[label]), end, label=label) for label, end in zip(runs, ends, strict=True)]
    first, after = notes.chosen(run_texts)
    return means_of_steps(_without_summary(rows[first:after], notes), notes)


def _as_printed(row: Mapping[str, object]) -> Printed:
    name, step, _ = counter_of(row) or ("", None, None)
    return Printed(values_of_row(row), step, EVAL if row.get("split") == EVAL else TRAIN, name)


def _name_of_run(rows: Sequence[Row]) -> str | None:
    """Return the name under which rows say of which run they are; None if nothing does, or each is another one."""
    for name in RUNS:
        values = [row.get(name) for row, _ in rows]
        if all(isinstance(value, (str, int)) for value in values) and 1 < len({*values}) <= len(values) / 2:
            return name
    return None


def _with_steps(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    """Return the rows that have a step; where none has, and they are of an update each, their places are the steps."""
    rows = _of_trainer(rows, notes)
    stepped = [row for row in rows if step_of(row[0]) is not None]
    if not stepped and (numbered := steps_by_place([row for row, _ in rows])):
        notes.counted_steps = True
        notes.say("the lines have no step: they are numbered from 1")
        return [(row, where) for row, (_, where) in zip(numbered, rows, strict=True)]
    without = [where for row, where in rows if step_of(row) is None] if stepped else []
    if without:
        count = "1 line has no step and is" if len(without) == 1 else f"{len(without):,} lines have no step and are"
        notes.say(f"{count} left out ({without[0].rpartition(', ')[2]})")
    return stepped or rows


def _of_trainer(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    """Return rows that a tracker numbers itself, as ``_step``, under the trainer's step, where some have it."""
    if not any("_step" in row for row, _ in rows):
        return rows
    named = next((name for name in STEPS if _counts(name, [row for row, _ in rows])), "_step")
    numbered = [(row, where) for row, where in rows if row.get(named) is not None]
    if len(numbered) < len(rows):
        notes.say(f"{len(rows) - len(numbered):,} records without {named} are left out")
    return [({name: row[named] if name in STEPS else row[name] for name in row}, where) for row, where in numbered]


def _counts(name: str, rows: Sequence[Mapping[str, object]]) -> bool:
    """Tell a step from a number that never changes though a metric is logged anew: a loop logs beside its trainer."""
    present = [row for row in rows if row.get(name) is not None]
    if len({str(row[name]) for row in present}) != 1:
        return bool(present)
    logged = Counter(
        other for row in present for other, value in row.items() if value is not None and not other.startswith("_")
    )
    return all(count == 1 for other, count in logged.items() if other not in STEPS)


def _without_summary(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    """Return rows without the last ones that are of the run, as a word in them, their names or their numbers say."""
    if len(rows) < _MOST + _FEWEST or any("data" in row or is_long(row) for row, _ in rows[-_MOST:]):
        return rows
    usual = set[str]().union(*(values_of_row(row) for row, _ in rows[:-_MOST])) - {*STEPS}
    end = len(rows)
    while len(rows) - end < _MOST and _is_summary(rows[end - 1][0], usual, rows[: end - 1]):
        end -= 1
    if end < len(rows):
        count = "the last row is" if end == len(rows) - 1 else f"the last {len(rows) - end} rows are"
        notes.say(f"{count} of the whole run, and left out ({rows[end][1].rpartition(', ')[2]})")
    return rows[:end]


def _is_summary(row: Mapping[str, object], usual: set[str], before: Sequence[Row]) -> bool:
    """Tell by a word, by other names for what the rows before have, or by sums or means of two of their numbers."""
    first = before[0][0]
    if any(_is_word(value) and first.get(name) != value for name, value in row.items()):
        return True
    names = values_of_row(row).keys() - {*STEPS}
    shared = names & usual
    if not shared:
        is_again = {*metric_quantities(names).values()} & {*metric_quantities(usual).values()}
        return bool(is_again) and not any(map(is_held_out, row))
    return len(shared) > 1 and all(_is_of_all(row[name], name, before) for name in shared)


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _SUMMARIES


def _is_of_all(value: object, name: str, before: Sequence[Row]) -> bool:
    """Tell the sum of the numbers before, above or below all of them, or their mean where they differ."""
    numbers = [float(cell) for row, _ in before if isinstance(cell := row.get(name), (int, float))]
    if not isinstance(value, (int, float)) or not numbers or not math.isfinite(total := sum(numbers)):
        return False
    least, most = min(numbers), max(numbers)
    is_sum = not least <= value <= most and abs(value - total) <= _SUM * abs(total)
    return is_sum or abs(value - total / len(numbers)) < _MEAN * (most - least)

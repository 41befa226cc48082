"""The runs in a file of rows: told apart by a name in them, or where the steps begin anew."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.counters import through_epochs
from rolloutdoctor.importers.logs.notes import LogNotes, RunOfText
from rolloutdoctor.importers.logs.parts_of_steps import Row, means_of_steps, values_of_row, with_shares
from rolloutdoctor.importers.logs.printed import Printed
from rolloutdoctor.importers.logs.printed_runs import runs_in
from rolloutdoctor.importers.logs.row_names import RUNS, counter_of
from rolloutdoctor.importers.logs.rows import entries_of
from rolloutdoctor.importers.logs.rows_with_steps import with_steps, without_summary


def entries_of_rows(rows: Sequence[Row], name: str, notes: LogNotes, *, is_printed: bool = False) -> Iterator[Entry]:
    """Yield what the rows of one run log, a row for each of its steps.

    Args:
        rows: of a file, in their order.
        name: of the file.
        notes: says which run is wanted, and takes what is said of the others, and of what is left out.
        is_printed: whether the transformers Trainer may have logged them.
    """
    for row, where in _of_one_run(with_steps(rows, name, notes), name, notes):
        yield from entries_of(row, where, notes, is_printed=is_printed)


def _of_one_run(rows: Sequence[Row], name: str, notes: LogNotes) -> Sequence[Row]:
    named = _name_of_run(rows)
    if named is None:
        counters = [counter_of(row) or ("", None) for row, _ in rows]
        splits = [EVAL if row.get("split") == EVAL else TRAIN for row, _ in rows]
        records = through_epochs(
            [
                Printed(values_of_row(row), step, split)
                for (row, _), (_, step, *_), split in zip(rows, counters, splits, strict=True)
            ]
        )
        rows = [
            (row if record.step == step else {**row, named: record.step}, where)
            for (row, where), (named, step, *_), record in zip(rows, counters, records, strict=True)
        ]
        found = runs_in(records)
    else:
        runs: dict[str, list[Row]] = {}
        for row, where in rows:
            own = {one: value for one, value in row.items() if one != named}
            runs.setdefault(f"{named}={row[named]}", []).append((own, where))
        rows = [row for of_run in runs.values() for row in of_run]
        ends = list(accumulate(map(len, runs.values())))
        found = [RunOfText(end - len(runs[label]), end, label=label) for label, end in zip(runs, ends, strict=True)]
    first, after = notes.chosen(found, name)
    return one_row_a_step(without_summary(rows[first:after], name, notes), name, notes)


def one_row_a_step(rows: Sequence[Row], name: str, notes: LogNotes) -> Sequence[Row]:
    """Return one row for each step of a run, with what its rows say of it together; `notes` takes what was done."""
    return with_shares(means_of_steps(rows, name, notes), name, notes)


def _name_of_run(rows: Sequence[Row]) -> str | None:
    """Return the name under which rows say of which run they are; None if nothing does, or each is another one."""
    for name in RUNS:
        values = [row.get(name) for row, _ in rows]
        if all(isinstance(value, (str, int)) for value in values) and 1 < len({*values}) <= len(values) / 2:
            return name
    return None

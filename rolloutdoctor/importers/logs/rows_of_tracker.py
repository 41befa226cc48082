"""Rows that a tracker numbers itself, such as wandb and trackio, under the step of the trainer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.parts_of_steps import means_of_steps
from rolloutdoctor.importers.logs.row_names import STEPS
from rolloutdoctor.importers.logs.rows import entries_of


def entries_of_tracker(rows: Sequence[Mapping[str, object]], name: str, notes: LogNotes) -> Iterator[Entry]:
    """Yield what a tracker's rows log, which it numbers itself: under the trainer's step, where some have it.

    Args:
        rows: each with the tracker's number as ``_step``.
        name: of the run.
        notes: takes a sentence on the rows that have no step of the trainer, such as TRL's timings.
    """
    named = next((each for each in STEPS if _counts(each, rows)), "_step")
    without = sum(row.get(named) is None for row in rows)
    if without:
        notes.tell(f"{name}: {without:,} records without {named} are left out")
    of_steps = [
        ({one: row[named] if one in STEPS else value for one, value in row.items()}, f"{name}, record {number}")
        for number, row in enumerate(rows, start=1)
        if row.get(named) is not None
    ]
    for row, where in means_of_steps(of_steps, name, notes):
        yield from entries_of(row, where, notes)


def _counts(name: str, rows: Sequence[Mapping[str, object]]) -> bool:
    """Tell a step from a number that never changes though a metric is logged anew: a loop logs beside its trainer."""
    own = [row for row in rows if row.get(name) is not None]
    if len({str(row[name]) for row in own}) != 1:
        return bool(own)
    logged = [key for row in own for key, value in row.items() if value is not None and not key.startswith("_")]
    return all(count == 1 for key, count in Counter(logged).items() if key not in STEPS)

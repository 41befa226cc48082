"""A row of names and numbers as entries of a log, each of a step and a split."""

import re
from collections.abc import Iterator, Mapping

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Cell, numbers
from rolloutdoctor.importers.logs.row_names import STEPS, is_long
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.metric_names.table import names_with_a_split
from rolloutdoctor.results.errors import DataError

_OF_TRAINER = re.compile(
    r"(train|eval)/(epoch|learning_rate|reward|reward_std|frac_reward_zero_std|kl|(rewards|completions|clip_ratio)/.*)"
)
"""Names that the transformers Trainer alone reports, where a table of them has lost its step."""


def step_in(value: object, notes: LogNotes) -> object:
    """Return a step of which the total may be said with it.

    >>> notes = LogNotes()
    >>> step_in("5/16", notes), step_in(5, notes), step_in("7", notes), notes.total_steps
    (5, 5, 7, 16)
    """
    if isinstance(value, str) and value.isascii() and value.strip().isdecimal() and len(value) < 19:
        return int(value)
    done, slash, total = value.partition("/") if isinstance(value, str) else ("", "", "")
    if not (slash and done.isdecimal() and total.isdecimal() and len(done) < 19 and len(total) < 19):
        return value
    notes.planned(int(total))
    return int(done)


LENGTHS = ("max_steps", "total_steps", "total_training_steps")
"""Names under which a row has the steps that the run was planned for."""


_NO_METRICS = frozenset({*STEPS, "split"})


def entries_of(row: Mapping[str, object], where: str, notes: LogNotes) -> Iterator[Entry]:
    """Yield what a row of names and values logs.

    Raises:
        DataError: if it has no step.
    """
    data = row.get("data")
    if isinstance(data, dict):
        yield cells.natural(dict(row), "step", where), TRAIN, numbers(data, where)
        return
    named = next((name for name in STEPS if row.get(name) is not None), None)
    if named is None:
        raise DataError(f"{where}: no step; the number of the optimizer step has to be in one of {', '.join(STEPS)}")
    step = cells.natural({named: step_in(row[named], notes)}, named, where)
    for length in LENGTHS:
        notes.planned(row.get(length))
    notes.lists_of(row, where)
    if is_long(row):
        split = EVAL if row.get("split") == EVAL else TRAIN
        yield step, split, {str(row["name"]): cells.number(row["value"], f"{where}: value")}
        return
    # The transformers Trainer reports to wandb and others as train/kl and eval/kl, beside its own step.
    prefixed = "train/global_step" in row or (
        any(map(_OF_TRAINER.fullmatch, row)) and row.keys().isdisjoint(names_with_a_split())
    )
    splits: dict[str, dict[str, Cell]] = {}
    values = {name: value for name, value in row.items() if name not in _NO_METRICS and not name.startswith("_")}
    for name, value in numbers(values, where).items():
        split = EVAL if row.get("split") == EVAL else TRAIN
        if prefixed:
            split = EVAL if name.startswith("eval/") else TRAIN
            name = name.removeprefix("eval/").removeprefix("train/")
        splits.setdefault(split, {})[name] = value
    for split, of_split in splits.items():
        yield step, split, of_split

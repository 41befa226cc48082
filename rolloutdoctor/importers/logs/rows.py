"""A row of names and numbers as entries of a log, each of a step and a split."""

import re
from collections.abc import Iterator, Mapping

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry, of_splits
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import numbers
from rolloutdoctor.importers.logs.row_names import OF_TRAINER, STEPS, counter_of, is_long
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.metric_names.table import names_with_a_split
from rolloutdoctor.results.errors import DataError

_REPORTED = re.compile(
    r"(train|eval)/(epoch|learning_rate|reward|reward_std|frac_reward_zero_std|kl|(rewards|completions|clip_ratio)/.*)"
)
"""Names that the transformers Trainer alone reports, where a table of them has lost its step."""

LENGTHS = ("max_steps", "total_steps", "total_training_steps")
"""Names under which a row has the steps that the run was planned for."""

_NO_METRICS = frozenset({*STEPS, "split"})


def entries_of(row: Mapping[str, object], where: str, notes: LogNotes, *, is_printed: bool = False) -> Iterator[Entry]:
    """Yield what a row of names and values logs.

    Args:
        row: a row, with a step.
        where: file, and line, row or record.
        notes: takes the length of the run, and which means are read.
        is_printed: whether the transformers Trainer may have logged it, as ``kl`` and ``eval_kl``.

    Raises:
        DataError: if it has no step.
    """
    found = counter_of(row)
    if found is None:
        named = next((name for name in STEPS if row.get(name) is not None), None)
        if named is not None:
            cells.natural(dict(row), named, where)
        raise DataError(f"{where}: no step; the number of the optimizer step has to be in one of {', '.join(STEPS)}")
    _, step, total = found
    for length in (total, *map(row.get, LENGTHS)):
        notes.planned(length)
    data = row.get("data")
    if isinstance(data, dict):
        yield step, TRAIN, numbers(data, where)
        return
    notes.lists_of(row, where)
    own = EVAL if row.get("split") == EVAL else TRAIN
    if is_long(row):
        yield step, own, {str(row["name"]): cells.number(row["value"], f"{where}: value")}
        return
    # The transformers Trainer reports to wandb and others as train/kl and eval/kl, beside its own step.
    is_reported = "train/global_step" in row or (
        any(map(_REPORTED.fullmatch, row)) and row.keys().isdisjoint(names_with_a_split())
    )
    evaluations = "eval_" if is_printed and OF_TRAINER & row.keys() else "eval/" if is_reported else ""
    values = {name: value for name, value in row.items() if name not in _NO_METRICS and not name.startswith("_")}
    for split, of_split in of_splits(numbers(values, where), evaluations, own):
        yield step, split, of_split

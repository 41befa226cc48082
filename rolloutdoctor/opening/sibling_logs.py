"""Folders side by side with the logs of one training, as ``logs/`` and ``tb/``: told by the numbers in them."""

import math
from collections.abc import Sequence
from pathlib import Path

from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.opening.logs import are_apart, logs_of, of_one_run, tables_of
from rolloutdoctor.results.errors import RolloutDoctorError

_MOST = 4
"""Folders of one training; more are of several, and to read them all takes long."""

_FEWEST = 3
"""Numbers, none of them whole, that two trainings do not have at the same steps by chance."""

_SINGLE = 2.0**-22
"""How far a number that TensorBoard keeps is from its own."""


def are_of_one_training(folders: Sequence[Path]) -> bool:
    """Tell folders of logs that hold the same numbers at the same steps, and nowhere others, each in another format."""
    if len(folders) > _MOST:
        return False
    notes = ReaderNotes()
    try:
        logs = [logs_of([str(folder)]) for folder in folders]
        if not all(logs):
            return False
        kinds = [{kind_of(Path(log.path)) for log in each} for each in logs]
        if len(set().union(*kinds)) < sum(map(len, kinds)):
            # Nothing writes the same twice: they are copies, or runs of one seed.
            return False
        read = [tables_of(each, notes) for each in logs]
        tables = [of_one_run(each, notes) for each in read]
        of_one_run([table for each in read for table in each], notes)
    except RolloutDoctorError:
        return False
    before = [(tables[:place], table) for place, table in enumerate(tables)][1:]
    return all(
        any(_share(table, other) for other in others) and not any(are_apart(table, other) for other in others)
        for others, table in before
    )


def _share(left: LoggedMetrics, right: LoggedMetrics) -> bool:
    """Tell two logs with some numbers in common, each another one."""
    same = set[float]()
    for key in (key for key in left.steps() if key.split == TRAIN):
        mine, its = _bare(left, key), _bare(right, key)
        same |= {
            mine[name] for name in mine.keys() & its.keys() if math.isclose(mine[name], its[name], rel_tol=_SINGLE)
        }
    return sum(value % 1 > 0 for value in same) >= _FEWEST


def _bare(table: LoggedMetrics, key: StepKey) -> dict[str, float]:
    """Return the metrics of a step without the prefix that trackers put before their names."""
    return {name.removeprefix("train/"): value for name, value in table.at(key).items()}

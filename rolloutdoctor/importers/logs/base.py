"""Interface of readers of logged numbers, and the conversion of a row of names and numbers to entries."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolloutdoctor.data.schema import COLUMNS, Kind
from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.metric_names.generic import generic
from rolloutdoctor.metric_names.table import names_with_a_split
from rolloutdoctor.results.errors import DataError, InputError


@dataclass(frozen=True)
class NoNumber:
    """Cell of a log that is no number: `read_log` leaves it out, and a note says so.

    Attributes:
        text: of the cell, short.
        where: file, and line, row or record.
    """

    text: str
    where: str


Cell = float | NoNumber | None

Entry = tuple[int, str, Mapping[str, Cell]]
"""Step, split, and value by name."""

Tell = Callable[[str], None]
"""Takes a sentence for the user."""


@dataclass(frozen=True)
class RunOfText:
    """One of the runs in a file.

    Attributes:
        first: its first record.
        after: the record behind its last one.
        kind: of training, such as ``rewards``; empty if nothing says.
    """

    first: int
    after: int
    kind: str = ""


class LogNotes:
    """What a log says beside its numbers, and which of its runs is wanted.

    Args:
        tell: takes a sentence for the user; the notes of the run, or any function.
        run: number of the run that is wanted of a file with several, counted from 1; None: the one that is read.

    Attributes:
        total_steps: optimizer steps that the run was planned for; None if the log does not say.
        counted_steps: whether its lines say no step, so that they are numbered.
        runs: how many runs the file holds.
        reader: the notes of the run, which take the cells that are no numbers.
    """

    def __init__(self, tell: Tell = lambda sentence: None, run: int | None = None) -> None:
        self.tell = tell
        self.reader = tell if isinstance(tell, ReaderNotes) else ReaderNotes()
        self.run = run
        self.total_steps: int | None = None
        self.counted_steps = False
        self.runs = 1
        self._lists: set[str] = set()

    def lists_of(self, row: Mapping[str, object], where: str) -> None:
        """Say once of each name whose cells are lists of numbers that their means are read."""
        for name in sorted(name for name, cell in row.items() if name not in self._lists and is_list(cell)):
            self._lists.add(name)
            self.tell(f"{where}: {name} is a list: its mean is read")

    def planned(self, steps: object) -> None:
        """Take the length of the run, where it is one: a run that was prolonged has the largest."""
        if isinstance(steps, (int, float)) and not isinstance(steps, bool) and 0 < steps < 2**53 and steps % 1 == 0:
            self.total_steps = max(int(steps), self.total_steps or 0)

    def chosen(self, runs: Sequence[RunOfText], name: str) -> tuple[int, int]:
        """Return from which record to which the run is that is read: of several the longest with rewards.

        Raises:
            InputError: if another one is wanted than there are.
        """
        self.runs = len(runs)
        if not runs:
            return 0, 0
        longest = max(runs, key=lambda run: (run.kind == "rewards", run.after - run.first, run.first))
        number = self.run or 1 + runs.index(longest)
        if number > len(runs):
            raise InputError(f"{name}: no run {number} is there; it holds {len(runs)}")
        if len(runs) > 1 and self.run is None:
            shown = [f"{run.after - run.first:,} lines" + (f" ({run.kind})" if run.kind else "") for run in runs[:4]]
            more = f" and {len(runs) - 4:,} more" if len(runs) > 4 else ""
            self.tell(
                f"{name}: {len(runs)} runs one after another, of {', '.join(shown)}{more}: the {ordinal(number)} is "
                f"read; give {name}/N for another one, or check them with --each"
            )
        return runs[number - 1].first, runs[number - 1].after


def ordinal(number: int) -> str:
    """Return a number in the order of things.

    >>> ordinal(1), ordinal(12), ordinal(23)
    ('1st', '12th', '23rd')
    """
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')}"


STEPS = (
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "training_step",
    # ms-swift's, in logging.jsonl and on the console: "5/16"
    "global_step/max_steps",
    # LLaMA-Factory's, in trainer_log.jsonl
    "current_steps",
    # ROLL's
    "system/step",
    "steps",
    "iteration",
    "iter",
    "update",
    # wandb's own counter, which grows with every call
    "_step",
)
"""Names under which loggers have the step, the best first."""


OF_UPDATES = frozenset({"loss", "grad_norm", "learning_rate", "epoch"})
"""Metrics that no rollout has."""


def of_rollouts(names: Collection[str]) -> set[str]:
    """Return the columns of a rollout that some names are, but for those that metrics share."""
    known = {column for column in COLUMNS if any(name in names for name in (column.name, *column.aliases))}
    return {column.name for column in known if column.kind is not Kind.FLOATS} - {"step", "split"}


def is_log_row(names: Collection[str]) -> bool:
    """Tell the names of a row of logged numbers from those of a rollout: some have a slash, or are of means."""
    named = [name for name in names if name not in STEPS]
    if any("/" in name for name in named) or is_of_update(names):
        return True
    return of_rollouts(names) <= {"reward"} and any(generic(name) and not of_rollouts([name]) for name in named)


def is_of_update(names: Collection[str]) -> bool:
    """Tell names of which one is a metric that no rollout has, and none is of a rollout but the reward."""
    return of_rollouts(names) <= {"reward"} and any(name in OF_UPDATES for name in names)


_OF_TRAINER = re.compile(
    r"(train|eval)/(epoch|learning_rate|reward|reward_std|frac_reward_zero_std|kl|(rewards|completions|clip_ratio)/.*)"
)
"""Names that the transformers Trainer alone reports, where a table of them has lost its step."""


_SPELLED = {
    "nan": math.nan,
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), math.inf),
    **dict.fromkeys(("-inf", "-infinity"), -math.inf),
}
"""How JSON, Python and others write a number that is not finite, in lower case."""


class LogFormat(Protocol):
    """One way in which programs write logged numbers. The docstring names the upstream function that writes them."""

    def detect(self, path: Path) -> str | None:
        """Say what `path`, a file or a folder, is; None if it is not of this format. Reads little, and not the name."""
        ...

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what was logged, in file order; `notes` takes what was assumed, and the length of the run.

        Raises:
            InputError: if it is not what it looks like.
        """
        ...


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


_NO_METRICS = frozenset({*STEPS, "split"})


def entries_of_tracker(rows: Sequence[Mapping[str, object]], name: str, notes: LogNotes) -> Iterator[Entry]:
    """Yield what a tracker's rows log, which it numbers itself: under the trainer's step, where some have it.

    Args:
        rows: each with the tracker's number as ``_step``.
        name: of the run.
        notes: takes a sentence on the rows that have no step of the trainer, such as TRL's timings.
    """
    named = next((each for each in STEPS if any(row.get(each) is not None for row in rows)), "_step")
    without = sum(row.get(named) is None for row in rows)
    if without:
        notes.tell(f"{name}: {without:,} records without {named} are left out")
    for number, row in enumerate(rows, start=1):
        if row.get(named) is not None:
            yield from entries_of(row, f"{name}, record {number}", notes)


def is_long(row: Mapping[str, object]) -> bool:
    """Tell a row that holds one metric: its step, name and value."""
    return {"step", "name", "value"} <= set(row) <= {"step", "name", "value", "split"}


def numbers(values: Mapping[str, object], where: str) -> dict[str, Cell]:
    """Return values as numbers or null, and what is neither as `NoNumber`; empty texts and media are left out.

    wandb and trackio write "NaN" for a number that is not finite, others "nan" or "inf".
    """
    spelled = {
        name: _SPELLED.get(value.strip().lower(), value) if isinstance(value, str) else _mean(value)
        for name, value in values.items()
    }
    return {
        name: _in_float32(as_float(value)) if is_number(value) else NoNumber(cells.shown(value), where)
        for name, value in spelled.items()
        if not _says_nothing(name, value)
    }


def _mean(value: object) -> object:
    """Return the mean of a list of numbers; what is none as it is."""
    cells = [cell for cell in value if cell is not None] if isinstance(value, list) and is_list(value) else []
    return sum(cells) / len(cells) if cells else value


_LARGEST = 3.4028235e38


def _in_float32(value: float | None) -> float | None:
    """Return a number as trainers hold it, in float32: what is larger is infinite there."""
    return value if value is None or not abs(value) > _LARGEST else math.copysign(math.inf, value)


def _says_nothing(name: str, value: object) -> bool:
    """Tell an empty text, and what wandb and trackio keep of a table, a picture or a histogram."""
    if isinstance(value, dict):
        return "_type" in value
    return isinstance(value, str) and (not value.strip() or name.rpartition("/")[2].startswith("_"))


def is_list(value: object) -> bool:
    """Tell a list of numbers, such as the rewards of the responses of a step."""
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def is_number(value: object) -> bool:
    """Tell a number, or null, from everything else."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def as_float(value: object) -> float | None:
    """Return a number as a float; None if it is none."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf

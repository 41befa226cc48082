"""What a log says beside its numbers, and which of its runs is read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar, cast

from rolloutdoctor.importers.logs.numbers import REWARD_STD, REWARDS, is_list, is_quoted
from rolloutdoctor.importers.reading.lines import is_growing
from rolloutdoctor.importers.reading.unchanged import state_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.metric_names.table import is_bookkeeping
from rolloutdoctor.results.errors import InputError

_Found = TypeVar("_Found")

Tell = Callable[[str], None]
"""Takes a sentence for the user."""


@dataclass(frozen=True)
class RunOfText:
    """One of the runs in a file.

    Attributes:
        first: its first record.
        after: the record behind its last one.
        kind: of training, such as ``rewards``; empty if nothing says.
        label: what the file calls it; empty if it does not.
    """

    first: int
    after: int
    kind: str = ""
    label: str = ""

    def __str__(self) -> str:
        lines = f"{self.after - self.first:,} lines"
        return f"{self.label} of {lines}" if self.label else lines + (f" ({self.kind})" if self.kind else "")


class LogNotes:
    """What a log says beside its numbers, and which of its runs is wanted.

    Args:
        tell: takes a sentence for the user; the notes of the run, or any function.
        run: number of the run that is wanted of a file with several, counted from 1; None: the one that is read.

    Attributes:
        name: of the log that is read.
        total_steps: optimizer steps that the run was planned for; None if the log does not say.
        begins: the line with the last number before the run that is read, 0 if there is none, and that with its first
            one, counted from 1; of a notebook the cells of code that these are outputs of. None: it is no text.
        counted_steps: whether its lines say no step, so that they are numbered.
        runs: how many runs the file holds.
        others: numbers of the runs beside the one that is read, those that would be read next first; empty if one
            was asked for.
        file: in which these lie, where a folder was given; empty if it is the log itself.
        part: which of several runs is read, as ``run 2 of 3``; empty if the file holds one.
        reader: the notes of the run, which take the cells that are no numbers.
    """

    def __init__(self, tell: Tell = lambda sentence: None, run: int | None = None) -> None:
        self.tell = tell
        self.reader = tell if isinstance(tell, ReaderNotes) else ReaderNotes()
        self.run = run
        self.name = ""
        self.total_steps: int | None = None
        self.begins: tuple[int, int] | None = None
        self.counted_steps = False
        self.environment = ""
        self.runs = 1
        self.others: tuple[int, ...] = ()
        self.file = ""
        self.part = ""
        self._converted: set[str] = set()

    def say(self, sentence: str) -> None:
        """Tell the user something of the log."""
        self.tell(f"{self.name}: {sentence}")

    def conversions_of(self, row: Mapping[str, object], where: str) -> None:
        """Say once of each name whose cells are lists, or texts, which numbers are read of them."""
        new = {name: cell for name, cell in row.items() if name not in self._converted}
        quoted = [name for name, cell in new.items() if is_quoted(cell) and not is_bookkeeping(name)]
        lists = sorted(name for name, cell in new.items() if is_list(cell))
        self._converted.update(quoted, lists)
        if quoted:
            self.tell(f"{where}: the text of {', '.join(quoted)} is read as a number")
        for name in lists:
            std = f", and its deviation as {REWARD_STD}" if name in REWARDS and REWARD_STD not in row else ""
            self.tell(f"{where}: {name} is a list: its mean is read{std}")

    def without_texts(self, cells: Mapping[str, float | str | None], where: str) -> dict[str, float | None]:
        """Return the cells of a row that are numbers or null; those that are a text are counted."""
        for name, cell in cells.items():
            if isinstance(cell, str):
                self.reader.no_number(self.name, name, where.removeprefix(f"{self.name}, "), cell)
        return {name: cell for name, cell in cells.items() if not isinstance(cell, str)}

    def planned(self, steps: object) -> None:
        """Take the length of the run, where it is one: a run that was prolonged has the largest."""
        if isinstance(steps, (int, float)) and not isinstance(steps, bool) and 0 < steps < 2**53 and steps % 1 == 0:
            self.total_steps = max(int(steps), self.total_steps or 0)

    def chosen(self, runs: Sequence[RunOfText]) -> tuple[int, int]:
        """Return from which record to which the run is that is read: of several the longest with rewards.

        Raises:
            InputError: if another one is wanted than there are.
        """
        self.runs = max(len(runs), 1)
        if not runs:
            return 0, 0
        by_size = sorted(
            range(1, len(runs) + 1),
            key=lambda at: (runs[at - 1].kind == "rewards", runs[at - 1].after - runs[at - 1].first, at),
            reverse=True,
        )
        number = self.run or by_size[0]
        if number > len(runs):
            raise InputError(f"{self.name}: no run {number} is there; it holds {len(runs)}")
        if len(runs) > 1:
            label = runs[number - 1].label
            self.part = f"run {number} of {len(runs)}" + (f" ({label})" if label else "")
        if len(runs) > 1 and self.run is None:
            self.others = tuple(by_size[1:])
            more = f" and {len(runs) - 4:,} more" if len(runs) > 4 else ""
            how = "runs," if runs[0].label else "runs one after another, of"
            self.say(
                f"{len(runs)} {how} {', '.join(map(str, runs[:4]))}{more}: the {ordinal(number)} is "
                f"read; give {self.name}/N for another one, or check them with --each"
            )
        return runs[number - 1].first, runs[number - 1].after


def read_once(read: Callable[[Source, LogNotes], _Found], source: Source, notes: LogNotes) -> _Found:
    """Return what `read` finds in a log, and note what it notes; a log of several runs is read once for all of them.

    What was found in the last log is kept; `forget` lets go of it.
    """
    content, read_notes = _read(read, source, notes.name, state_of(Path(source.path)), is_growing())
    for sentence in read_notes.reader.sentences:
        notes.tell(sentence)
    notes.planned(read_notes.total_steps)
    notes.environment, notes.counted_steps = read_notes.environment, read_notes.counted_steps
    return cast(_Found, content)


@lru_cache(1)
def _read(
    read: Callable[[Source, LogNotes], object], source: Source, name: str, state: object, growing: object
) -> tuple[object, LogNotes]:
    notes = LogNotes(ReaderNotes())
    notes.name = name
    return read(source, notes), notes


forget = _read.cache_clear


def ordinal(number: int) -> str:
    """Return a number in the order of things.

    >>> ordinal(1), ordinal(12), ordinal(23)
    ('1st', '12th', '23rd')
    """
    last = 0 if number % 100 in (11, 12, 13) else number % 10
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(last, 'th')}"

"""Notes of readers: what was left out of a run, or read in doubt, said with every result."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rolloutdoctor.data.step_key import TRAIN, StepKey

NULL = "null in every line"
"""What a metric holds that was logged without a value."""

_MOST_NAMES = 3
"""Names in a sentence; the others are counted."""


_CLOCK = re.compile(r"(?i)(?<![a-z])(time|times|seconds|secs|runtime|duration|elapsed|throughput)(?![a-z])")
"""Words in the name of what two programs of one step measure each, such as those that generate and that train."""

_PERCENT = 0.01
"""How far a percentage with two digits may be from a hundred times the share."""


@dataclass
class _Cells:
    """Cells of one metric that are no numbers."""

    count: int
    place: str
    text: str


@dataclass
class _Repeats:
    """Steps of one file at which a metric was logged twice with two values."""

    steps: dict[StepKey, None] = field(default_factory=dict)
    first: str = ""


class ReaderNotes:
    """Sentences about how a run was read. Call it with one; `sentences` also has what it counted.

    A note ends in the result of every command, in every format: it says what the numbers do not rest on. What a command
    is doing (`tell` of commands) is said on stderr alone.
    """

    def __init__(self) -> None:
        self._sentences: dict[str, None] = {}
        self._cells: dict[str, dict[str, _Cells]] = {}
        self._read: dict[str, set[str]] = {}
        self._nulls: dict[str, dict[str, None]] = {}
        self._repeats: dict[str, _Repeats] = {}

    def __call__(self, sentence: str) -> None:
        """Add a sentence; one that is there already is not said again."""
        self._sentences.setdefault(sentence)

    def no_number(self, file: str, name: str, place: str, text: str) -> None:
        """Count a cell of a log that is no number and was left out.

        Args:
            file: name of the log.
            name: of the metric.
            place: line, row or record of the cell.
            text: of the cell.
        """
        of_file = self._cells.setdefault(file, {})
        cells = of_file.get(name)
        if cells is None:
            of_file[name] = _Cells(1, place, text)
        else:
            cells.count += 1

    def numbers(self, file: str, names: Iterable[str]) -> None:
        """Note names of a log that have a number at least once."""
        self._read.setdefault(file, set()).update(names)

    def nulls(self, file: str, names: Iterable[str]) -> None:
        """Note names of a log that a line of it has without a value."""
        self._nulls.setdefault(file, {}).update(dict.fromkeys(names))

    def repeated(self, file: str, key: StepKey, name: str, first: float, last: float) -> None:
        """Count a step that a log has twice with two values of a metric, of which the last one counts.

        Times say nothing of a run that was resumed, nor does a share that another line has in percent.
        """
        least, most = sorted((abs(first), abs(last)))
        if _CLOCK.search(name) or (least and math.isclose(100 * least, most, rel_tol=_PERCENT)):
            return
        repeats = self._repeats.setdefault(file, _Repeats())
        repeats.first = repeats.first or f"{name} at step {key.step} is {first:g} and then {last:g}"
        repeats.steps.setdefault(key)

    @property
    def sentences(self) -> tuple[str, ...]:
        """All notes, in the order of their kinds."""
        counted = [sentence for file, cells in self._cells.items() for sentence in self._of_cells(file, cells)]
        repeats = [_of_repeats(file, repeats) for file, repeats in self._repeats.items()]
        return tuple(dict.fromkeys((*self._sentences, *counted, *repeats)))

    @property
    def unread(self) -> Mapping[str, str]:
        """Metrics of which no cell is a number, each with what its first cell holds, or `NULL`."""
        numbers = set().union(*self._read.values())
        nulls = {name: NULL for names in self._nulls.values() for name in names if name not in numbers}
        return nulls | {
            name: f"{cells.text} in {file}, {cells.place}"
            for file, by_name in self._cells.items()
            for name, cells in by_name.items()
            if name not in numbers
        }

    def _of_cells(self, file: str, by_name: Mapping[str, _Cells]) -> Iterable[str]:
        numbers = self._read.get(file, set())
        parts = {name: cells for name, cells in by_name.items() if name in numbers}
        unnumbered = {name: cells for name, cells in by_name.items() if name not in numbers}
        if parts:
            words = [
                f"{cells.count:,} {'cell' if cells.count == 1 else 'cells'} of {name} ({cells.place}: {cells.text})"
                for name, cells in parts.items()
            ]
            is_one = sum(cells.count for cells in parts.values()) == 1
            yield f"{file}: {_some(words)} {'is no number and is' if is_one else 'are no numbers and are'} left out"
        if unnumbered:
            words = [
                f"no cell of {name} is a number ({cells.place}: {cells.text})" for name, cells in unnumbered.items()
            ]
            yield f"{file}: not read, as {_some(words)}"


def _of_repeats(file: str, repeats: _Repeats) -> str:
    keys = list(repeats.steps)
    named = [f"{key.step}" + (f" ({key.split})" if key.split != TRAIN else "") for key in keys]
    subject = f"step {named[0]} is" if len(keys) == 1 else f"steps {_some(named)} are"
    return (
        f"{file}: {subject} there twice with other values ({repeats.first}; the last counts): a run that was resumed?"
    )


def _some(words: list[str]) -> str:
    """Join words, of which those beyond the first few are counted."""
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")

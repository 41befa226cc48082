"""The steps of the lines of one run in a text: by what they say, progress bars, epochs, or their order."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.printed import Printed

_BAR = re.compile(r"(?<![0-9])([0-9]{1,18})/([0-9]{1,18}) \[")
_STATED = re.compile(r"""(?<!\w)logging_steps['"]?\s?[:=]\s?([0-9]{1,9})(?![\w.])""")
_PLANNED = re.compile(
    r"(?i)\btotal (?:train(?:ing)?|optimi[sz](?:ation|er)) steps\s{0,8}[:=]\s{0,8}([0-9][0-9,]{0,14})"
)
_STEPS_ALONE = re.compile(
    r"(?i)\W{0,12}(?:(?:total|num|number of|max|training|train)[ _]){0,2}steps\s{0,20}[:=]\s{0,8}"
    r"([0-9][0-9,]{0,14})\W{0,4}"
)
"""A length on a line of its own: ``Steps : 30``."""
_MOST_BARS = 8
"""Progress bars that are tried, those that were drawn most: generation and downloads have theirs, too."""


@dataclass
class Bars:
    """The progress bars that were drawn, each with the number of lines of numbers before it; and lines of text.

    Attributes:
        drawn: numbers of lines, steps that were done, and of how many.
        lines: of the text.
        every: the steps for which options in the text say that a line is logged.
        planned: numbers of lines, and the steps that a line between says the run is planned for.
    """

    drawn: list[tuple[int, int, int]] = field(default_factory=list)
    lines: int = 0
    every: set[int] = field(default_factory=set)
    planned: list[tuple[int, int]] = field(default_factory=list)

    def watched(self, text: Iterable[str], records: Sequence[object]) -> Iterator[str]:
        """Yield lines, and keep the bars in them."""
        for line in text:
            self.lines += 1
            if " [" in line:
                self.drawn += [(len(records), int(done), int(total)) for done, total in _BAR.findall(line)]
            if "logging_steps" in line:
                self.every |= {int(every) for every in _STATED.findall(line)}
            if (
                "steps" in line.lower()
                and (length := _PLANNED.search(line) or _STEPS_ALONE.fullmatch(line)) is not None
            ):
                self.planned.append((len(records), int(length[1].replace(",", ""))))
            yield line

    def at(self, chosen: Sequence[int]) -> "Bars":
        """Return them where only some of the lines of numbers are read."""
        drawn = [(bisect_left(chosen, at), done, total) for at, done, total in self.drawn]
        return replace(self, drawn=drawn, planned=[(bisect_left(chosen, at), steps) for at, steps in self.planned])

    def between(self, first: int, after: int) -> "Bars":
        """Return those that belong to some of the lines."""
        drawn = [(at - first, done, total) for at, done, total in self.drawn if first <= at <= after]
        # What is said behind the last line is of the next run.
        planned = [(at - first, steps) for at, steps in self.planned if first <= at < after]
        return replace(self, drawn=drawn, planned=planned)

    def length(self, last: int) -> int | None:
        """Return the steps that the run is planned for; None where none is said, or several that count something."""
        said = {steps for _, steps in self.planned}
        return max(said) if len(said) == 1 and max(said) >= last else None


def numbered(records: Sequence[Printed], bars: Bars, notes: LogNotes, *, growing: bool) -> Sequence[Row]:
    """Return the lines of one run with their steps.

    A line without a step has that of the progress bar that was drawn before it. Where none is drawn before each, but
    one says how many steps there were, and the lines are that number's share, steps are counted; else lines are
    numbered.
    """
    training = [place for place, record in enumerate(records) if record.split == TRAIN]
    every, steps, before = None, None, 0
    if any(record.step is None for record in records):
        epochs = [records[place].values.get("epoch") or 0.0 for place in training]
        every, planned, before = _interval(epochs, bars)
        steps, total = _positions(training, bars)
        notes.planned(planned if steps is None else total)
        said = min(bars.every) if len(bars.every) == 1 else 0
        if every is None and said and bars.length(0) == said * len(training):
            every = said
        if growing:
            # Nobody knows the steps yet, and the lines that were counted keep their numbers.
            every, steps, before = None, None, 0
    elif bars.drawn and (last := max((record.step or 0 for record in records), default=0)):
        totals = {total for _, done, total in bars.drawn if done == last}
        notes.planned(totals.pop() if len(totals) == 1 else None)
    # A line with other steps around it was cut before its own.
    is_undecided = growing and bool(bars.drawn)
    is_unnumbered = every is None and steps is None and all(record.step is None for record in records)
    if is_unnumbered and not is_undecided and not _counts_from_start([records[place] for place in training]):
        notes.counted_steps = True
        notes.say("the lines have no step number, and no progress bar shows one: they are numbered from 1")
    step, rows = before, list[Row]()
    for place, record in enumerate(records):
        counted = step + (every or 1) * (record.split == TRAIN)
        step = record.step if record.step is not None else counted if steps is None else steps.get(place, step)
        split = {} if record.split == TRAIN else {"split": record.split}
        rows.append(({**record.values, **record.texts, **split, "step": step}, f"step {step}"))
    notes.planned(bars.length(step))
    return rows


def _counts_from_start(records: Sequence[Printed]) -> bool:
    """Tell lines whose episodes, as TRL's PPO counts them, say that they are of one update each, from the first on."""
    episodes = [record.values.get("episode") or 0.0 for record in records]
    return len(episodes) > 1 and all(each == place * episodes[0] > 0 for place, each in enumerate(episodes, 1))


def _interval(epochs: Sequence[float], bars: Bars) -> tuple[int | None, int | None, int]:
    """Return the steps that a line stands for, those of the progress bar that reached its end, and those before.

    Of several bars it is the one that was drawn most. Steps before the first line are of a run that was resumed.

    Args:
        epochs: of the training lines; they grow evenly, but where the first step is logged as well.
        bars: that were drawn.
    """
    logged = len(epochs)
    is_whole = logged and abs(epochs[0] * logged - epochs[-1]) <= 0.005 * (logged + 1) + 1e-3 * epochs[-1]
    if not is_whole and not _is_even(epochs):
        return None, None, 0
    if is_whole and epochs[-1] and len(bars.every) == 1 and not any(done == total for _, done, total in bars.drawn):
        return min(bars.every), None, 0
    totals = Counter(total for _, _, total in bars.drawn)
    fitting: dict[int, tuple[int, int]] = {}
    for total in {total for _, done, total in bars.drawn if done == total}:
        if not is_whole:
            # Lines are at multiples of their interval; epochs with two digits have to tell which.
            width, first = ((epochs[-1] - epochs[0]) / (logged - 1), epochs[0])
            every = round(total * width / epochs[-1])
            if every and total % every == 0 and 4 * _ROUNDED * total < every * epochs[-1]:
                fitting[total] = every, (round(total * first / epochs[-1] / every) - 1) * every
            continue
        # More than one number of steps gives as many lines; of these, logs mostly end with the training.
        least, most = total // (logged + 1) + 1, total // logged
        if total % logged == 0 or least == most:
            fitting[total] = most, 0
    planned = max(fitting, key=lambda total: (totals[total], total), default=None)
    return (None, None, 0) if planned is None else (fitting[planned][0], planned, fitting[planned][1])


_ROUNDED = 0.005
"""How far an epoch that is printed with two digits is from its own."""


def _is_even(epochs: Sequence[float]) -> bool:
    """Tell epochs that grow by the same from line to line, as far as their digits show."""
    if len(epochs) < 3 or epochs[0] >= epochs[-1]:
        return False
    width = (epochs[-1] - epochs[0]) / (len(epochs) - 1)
    return all(abs(epoch - epochs[0] - place * width) <= 2 * _ROUNDED for place, epoch in enumerate(epochs))


def _positions(training: Sequence[int], bars: Bars) -> tuple[dict[int, int] | None, int | None]:
    """Return the step of each training line that a bar gives which was drawn before every one, and the bar's total.

    Lines are as many steps apart as they are logged, but for the first and the last one.
    """
    totals = Counter(total for _, _, total in bars.drawn)
    for total in sorted(totals, key=lambda total: (totals[total], total), reverse=True)[:_MOST_BARS]:
        drawn: Mapping[int, int] = {at: done for at, done, of in bars.drawn if of == total}
        steps = [drawn.get(place, 0) for place in training]
        gaps = [after - before for before, after in pairwise(steps)]
        if steps and min(steps) > 0 and min(gaps, default=1) > 0 and len({*gaps[1:-1]}) < 2:
            return dict(zip(training, steps, strict=True)), total
    return None, None

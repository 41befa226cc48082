"""Numbers that a progress bar shows beside its count: OpenRLHF's, trlX's, and those of loops of one's own."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rolloutdoctor.importers.logs.counters import COUNTERS
from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import (
    FEWEST_NUMBERS,
    LONGEST_LINE,
    Form,
    Printed,
    is_log_line,
    name_of,
    pairs,
)
from rolloutdoctor.metric_names.table import metric_quantities

_COUNT = (
    r"[0-9]{1,3}%\|[^|]{0,300}\| {0,12}(?P<done>[0-9]{1,12})/(?P<total>[0-9]{1,12}) "
    r"\[[0-9:]{1,12}<[0-9:?]{1,12}, {1,4}[0-9.?]{1,12}(?:s/\w{1,8}|\w{1,8}/s)(?:, (?P<shown>[^\]]{0,4000}))?"
)
_BAR = re.compile(rf"^(?P<label>[^|]{{0,300}}?(?:\|[^|%]{{1,100}}){{0,8}}?)[:\s]\s{{0,8}}{_COUNT}")
BAR = re.compile(rf"^[^|]{{0,300}}?(?:\|[^|%]{{1,100}}){{0,8}}?(?<![0-9]){_COUNT}\]?")
"""A bar with what it shows, as a part of a line that is not only one."""

_LABEL = re.compile(r"\]:\s{0,8}[0-9]{0,3}%?\s{0,2}$")
_ROUND = re.compile(r"\[([0-9]{1,9})/([0-9]{1,9})\]")
_NAMED = re.compile(r"(?i)(?<![a-z])(?:iteration|iter|step|update)[ #:=]{1,3}([0-9]{1,12})(?![0-9/.])")
_DIGITS = re.compile(r"[-+]?[0-9][0-9.e+-]*|nan|inf")


_FEWEST_ROUNDS = 5
"""Rounds up to which a bar that begins anew is taken for that of an epoch."""


@dataclass
class _Bar:
    """The numbers that one bar showed at each of its counts.

    Attributes:
        shown: by step, the last that were drawn there.
        before: steps of the rounds that are over.
        last: count and end that were drawn last.
        total: steps of all rounds, where the bar says how many there are.
        rounds: what it showed last in each round, where it does not count them.
    """

    shown: dict[int, dict[str, float | None]] = field(default_factory=dict)
    before: int = 0
    last: tuple[int, int] = (0, 0)
    total: int | None = None
    rounds: list[dict[str, float | None]] = field(default_factory=lambda: [{}])

    def take(self, values: dict[str, float | None], done: int, end: int, label: str) -> None:
        """Add what was drawn; a bar that begins anew after its end is the next round of one training."""
        rounds, named = _ROUND.search(label), _NAMED.search(label)
        if named is not None:
            # The bar of a part of a step, whose number is in its label.
            self.before, done, self.total = int(named[1]), 0, None
            self.shown.update({self.before: values} if values else {})
            return
        if rounds is not None:
            self.before, self.total = (max(int(rounds[1]), 1) - 1) * end, int(rounds[2]) * end
        elif done < self.last[0]:
            self.before += self.last[1] if self.last[0] == self.last[1] else 0
            self.rounds.append({})
        if rounds is None:
            self.total = end if not self.before else None
        self.last = (done, end)
        if done and values:
            self.shown[self.before + done] = self.rounds[-1] = values


class ProgressBars(Form):
    """``Episode [1/2]:  5%|▌ | 5/100 [01:00<19:00, 12.0s/it, reward=0.5, kl=0.01]``, a line a count.

    ``tqdm.format_meter`` (tqdm/std.py) draws it. Of several bars it is the one with rewards, then the one with most.
    """

    title = "progress bars with numbers"
    remarks = (
        "the numbers are those that a progress bar showed: each step is its count, which may be one behind, or the "
        "number of a bar that is drawn anew for each step",
    )

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield what the bar showed last at each count."""
        bars: dict[str, _Bar] = {}
        broken = ""
        for line in lines:
            # A terminal that is narrower than the bar breaks it into two lines.
            match = (_bar_in(f"{broken}{line}") if broken else None) or _bar_in(line)
            broken = line.rstrip("\r\n") if match is None and _is_open(line) else ""
            if match is None:
                continue
            labelled = [*pairs(match["label"]), *pairs(match["shown"] or "")]
            values = {name: number(text) for label, text in labelled if (name := name_of(label)) not in COUNTERS}
            is_log = len(values) >= FEWEST_NUMBERS - 1 and is_log_line(values)
            bar = bars.setdefault(_DIGITS.sub("#", _ROUND.sub("", match["label"])), _Bar())
            bar.take(values if is_log else {}, int(match["done"]), int(match["total"]), match["label"])
        best = max(bars.values(), key=_worth, default=_Bar())
        steps = best.shown.items()
        if len(best.rounds) > max(best.last[1], _FEWEST_ROUNDS):
            # A bar of each step, beside which others are of the same steps: ``gather`` and ``train`` of ART.
            each = [bar.rounds for bar in bars.values() if len(bar.rounds) == len(best.rounds) and bar is not best]
            rounds = zip(*each, best.rounds, strict=True)
            joined = ({name: value for part in parts for name, value in part.items()} for parts in rounds)
            steps = {number: values for number, values in enumerate(joined, start=1) if values}.items()
        for step, values in steps:
            yield Printed(values, step, total_steps=best.total)


def _bar_in(line: str) -> re.Match[str] | None:
    return _BAR.match(line) if "%|" in line and len(line) <= LONGEST_LINE else None


def _is_open(line: str) -> bool:
    """Tell a line that ends within a bar: with an open bracket, or after its label."""
    is_open = line.count("[") > line.count("]") or "%|" in line or _LABEL.search(line[-20:]) is not None
    return is_open and len(line) <= LONGEST_LINE


def _worth(bar: _Bar) -> tuple[bool, int]:
    names = {name for values in bar.shown.values() for name in values}
    return "reward" in metric_quantities(names).values() or any("reward" in name for name in names), len(bar.shown)

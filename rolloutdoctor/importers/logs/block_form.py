"""Names and numbers behind their step, on its line or in a block below it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.importers.logs.printed import FEWEST_NUMBERS, Form, Printed, is_log_line
from rolloutdoctor.importers.logs.rows import STEPS

_STEPS = (*STEPS[:-1], "time/total_timesteps")


@dataclass(frozen=True, eq=False)
class BlockForm(Form):
    """A line with a step, and names with numbers behind it, up to the next step or a name that is there already.

    Attributes:
        title: what a text of this form is, in words.
        begins: a step: its number and that of all, where the line has them; the step is in the block otherwise.
        part: a name and a number; a name without a number is that of a section.
        marks: text of every line that begins a step, and of every line with a part.
        names: label to metric; None: every name is that of a metric.
        first: number of the first step.
        in_block: whether the numbers are on the lines below the step.
        is_headless: whether blocks without a step are read.
        needs_step: whether a block without a step is none.
        is_of_tracker: whether names may have the prefix that the transformers Trainer gives them in trackers.
        before: rewrites the lines, where a number is printed before the step that it is of.
        remarks: what the user should know of the numbers.
    """

    title: str
    begins: re.Pattern[str]
    part: re.Pattern[str]
    marks: tuple[str, str]
    names: Mapping[str, str] | None = None
    first: int = 0
    in_block: bool = True
    is_headless: bool = False
    needs_step: bool = False
    is_of_tracker: bool = False
    before: Callable[[Iterable[str]], Iterable[str]] = iter
    remarks: tuple[str, ...] = ()

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the steps; a block without a step, where a form may have one, is of the next."""
        step, total, more, section, has_begun = 1 - self.first, None, 0, "", False
        is_said = False
        values: dict[str, float | None] = {}
        for begins, text in self._pieces(self.before(lines)):
            if begins is not None:
                yield from self._closed(values, step, total, is_said=is_said)
                # The lower edge of a table ends what the line above it counts.
                is_said = bool(begins.lastindex) or (is_said and not values)
                values, section, has_begun = {}, "", True
                if begins.lastindex:
                    step = int(begins[1]) - self.first + more
                    total = int(begins[2]) if begins.lastindex > 1 else None
            elif not (has_begun or self.is_headless):
                continue
            for label, cell in self.part.findall(text):
                if not cell:
                    section = label if label.endswith("/") else ""
                    continue
                name = label if "/" in label else f"{section}{label}"
                name = name if self.names is None else self.names.get(name, "")
                if not name:
                    continue
                if name in values or not has_begun:
                    # Who pastes a block without its step gives the steps from 1 on; AReaL shows several tables of one.
                    yield from self._closed(values, step, total, is_said=is_said)
                    more += has_begun
                    values, step, has_begun = {}, step + has_begun, True
                values[name] = number(cell)
        yield from self._closed(values, step, total, is_said=is_said)

    def _pieces(self, lines: Iterable[str]) -> Iterator[tuple[re.Match[str] | None, str]]:
        """Yield the lines that may have a part, from each beginning of a step to the next."""
        begins, part = self.marks
        for line in lines:
            starts = [*self.begins.finditer(line)] if begins in line else []
            if not starts and self.in_block and part in line:
                yield None, line
            ends = [*(match.start() for match in starts[1:]), len(line)]
            for match, end in zip(starts, ends[: len(starts)], strict=True) if starts else ():
                yield match, line[match.end() : end]

    def _closed(
        self, values: dict[str, float | None], step: int, total: int | None, *, is_said: bool
    ) -> Iterator[Printed]:
        """Yield what a block logs, under the step in it where the line before it says none."""
        named = next((name for name in _STEPS if values.get(name) is not None), "")
        counted = values.get(named)
        rest = {name: value for name, value in values.items() if name != named}
        if self.is_of_tracker and (
            named == "train/global_step" or {"train/learning_rate", "train/loss"} <= rest.keys()
        ):
            rest = {name.removeprefix("train/"): value for name, value in rest.items()}
        if self.needs_step and counted is None and not is_said:
            return
        if is_log_line(rest) and (self.names is not None or len(rest) >= FEWEST_NUMBERS - 1):
            own_step = step if self.begins.groups or self.in_block else None
            yield Printed(rest, own_step if counted is None or is_said else int(counted), total_steps=total)

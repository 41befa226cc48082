"""Text with numbers in it: what trainers print, among progress bars and anything else, tables, loops of one's own."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.bar_form import ProgressBars
from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.block_forms import (
    AREAL,
    NEMO_RL,
    PRIME_RL,
    STABLE_BASELINES,
    TWO_COLUMNS,
    WANDB_SUMMARY,
)
from rolloutdoctor.importers.logs.dict_forms import ANY_DICT, OPENRLHF, SLIME, TRAINER
from rolloutdoctor.importers.logs.line_forms import Pairs, VerlLine
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import as_float
from rolloutdoctor.importers.logs.parts_of_steps import means_of_steps, step_of_row, values_of_row
from rolloutdoctor.importers.logs.printed import Printed
from rolloutdoctor.importers.logs.printed_runs import runs_in
from rolloutdoctor.importers.logs.printed_steps import Bars, numbered
from rolloutdoctor.importers.logs.repeated_lines import BLOCKS, RepeatedLines
from rolloutdoctor.importers.logs.text_table import TextTable
from rolloutdoctor.importers.logs.warning_texts import Warnings
from rolloutdoctor.importers.reading import lines as reading
from rolloutdoctor.importers.reading.text_lines import beginning, lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.training_kind import environment_in
from rolloutdoctor.results.errors import InputError


class Form(Protocol):
    """One way in which programs print numbers. The docstring names the upstream function."""

    @property
    def title(self) -> str:
        """What a text of this form is, in words."""
        ...

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of its numbers, in sentences."""
        ...

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the lines with numbers, in their order."""
        ...


_PAIRS = Pairs()

FORMS: tuple[Form, ...] = (
    VerlLine(),
    SLIME,
    PRIME_RL,
    NEMO_RL,
    OPENRLHF,
    AREAL,
    TRAINER,
    TextTable(),
    STABLE_BASELINES,
    TWO_COLUMNS,
    WANDB_SUMMARY,
    RepeatedLines(),
    ANY_DICT,
    _PAIRS,
    BLOCKS,
    ProgressBars(),
    Warnings(),
)
"""In the order in which they are tried: the narrowest first."""

ANY_NAMES = FORMS[-6:]
"""Forms that no trainer's names or layout tell."""

_OF_A_TRAINING = ("trainer_state.json", "training_args.bin")
"""Files beside a model card, which repeats some of what is in them, rounded."""

_OF_WANDB = ("debug.log", "debug-internal.log", "debug-core.log")
"""What wandb writes of itself, the configuration of the run among it."""

_LENGTH = re.compile(r"Total training steps: ([0-9]{1,15})")


class Console:
    """A text in which somebody printed numbers, in one of `FORMS`."""

    def detect(self, path: Path) -> str | None:
        """Look for a line with numbers of a training."""
        if path.name in _OF_WANDB:
            return None
        if path.name == "README.md" and any((path.parent / name).exists() for name in _OF_A_TRAINING):
            return None
        text = beginning(path)
        # What a collector of logs has put into objects is text all the same.
        first = next((line for line in text if line.strip()), "").strip()
        if first.startswith("[{") or (first.startswith("{") and reading.parse(first.encode()) is not None):
            # JSON is read as JSON: its lines may be rollouts.
            return None
        form = form_of(text)
        return None if form is None else form.title

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the numbers of one run, with their steps."""
        form = form_of(beginning(Path(source.path)))
        if form is None:
            raise InputError(f"{source.name}: no line with numbers of a training is there")
        yield from entries_of_text(lines_of(source), form, source.name, notes)


def form_of(lines: Sequence[str]) -> Form | None:
    """Return the form in which a text has numbers; None if it has none.

    Dicts that nothing counts may be those of responses, among lines of names and numbers with more in them.
    """
    form = next((form for form in FORMS if next(form.records(lines), None) is not None), None)
    if form is not ANY_DICT:
        return form
    dicts, counted = [*ANY_DICT.records(lines)], [*_PAIRS.records(lines)]
    is_part = all(record.step is None for record in dicts) and _numbers_in(dicts) < _numbers_in(counted)
    return _PAIRS if is_part else form


def _numbers_in(records: Sequence[Printed]) -> int:
    return sum(len(record.values) for record in records)


def is_step(line: str) -> bool:
    """Tell a line with the numbers of a step of verl or slime."""
    if "step" not in line and "rollout" not in line:
        return False
    return any(next(form.records([line]), None) is not None for form in FORMS[:2])


def entries_of_text(text: Iterable[str], form: Form, name: str, notes: LogNotes) -> Iterator[Entry]:
    """Yield the numbers of one run of a text, with the steps that lines, progress bars or their order give."""
    bars = Bars()
    records: list[Printed] = []
    for record in form.records(bars.watched(_lengths(text, notes), records)):
        records.append(record)
        notes.planned(record.total_steps)
    if form in ANY_NAMES and len(joined := _by_steps(records, name, notes)) < len(records):
        records, bars = joined, Bars([(0, done, total) for _, done, total in bars.drawn])
    runs = runs_in(records)
    first, after = notes.chosen(runs, name)
    yield from numbered(records[first:after], bars.between(first, after), name, notes, growing=reading.is_growing())
    for sentence in form.remarks:
        notes.tell(f"{name}: {sentence}")


def _by_steps(records: Sequence[Printed], name: str, notes: LogNotes) -> list[Printed]:
    """Return lines of steps, where some of each are of its samples."""
    if any(record.step is None or record.split != TRAIN for record in records):
        return [*records]
    first = {record.step: record for record in reversed(records)}
    rows = [({"step": record.step, **record.values}, "") for record in records]
    found = [(step_of_row(row), values_of_row(row)) for row, _ in means_of_steps(rows, name, notes)]
    if len(found) == len(rows):
        return [*records]
    return [
        replace(first[step], values={name: as_float(value) for name, value in values.items() if name != "step"})
        for step, values in found
    ]


def _lengths(text: Iterable[str], notes: LogNotes) -> Iterator[str]:
    for line in text:
        if "Total training" in line and (length := _LENGTH.search(line)) is not None:
            notes.planned(int(length[1]))
        notes.environment = notes.environment or environment_in(line)
        yield line

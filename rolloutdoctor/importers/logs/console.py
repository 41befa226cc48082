"""Text with numbers in it: what trainers print, among progress bars and anything else, tables, loops of one's own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.importers.logs.dict_forms import ANY_DICT
from rolloutdoctor.importers.logs.forms import ANY_NAMES, form_of
from rolloutdoctor.importers.logs.notes import LogNotes, RunOfText, read_once
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.parts_of_steps import means_of_steps
from rolloutdoctor.importers.logs.printed import Form, Printed
from rolloutdoctor.importers.logs.printed_runs import runs_in
from rolloutdoctor.importers.logs.printed_steps import Bars, numbered
from rolloutdoctor.importers.logs.rows import entries_of
from rolloutdoctor.importers.reading import lines as reading
from rolloutdoctor.importers.reading.text_lines import beginning, lines_of
from rolloutdoctor.importers.reading.unchanged import kept
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.training_kind import environment_in
from rolloutdoctor.results.errors import InputError

_OF_A_TRAINING = ("trainer_state.json", "training_args.bin")
"""Files beside a model card, which repeats some of what is in them, rounded."""

_OF_WANDB = ("debug.log", "debug-internal.log", "debug-core.log")
"""What wandb writes of itself, the configuration of the run among it."""


@dataclass(frozen=True)
class Text:
    """The numbers of a text with all its runs.

    Attributes:
        form: in which they are printed.
        records: the lines or blocks with numbers.
        places: the line of the text at which each of them ends, counted from 1.
        bars: the progress bars among them.
        runs: from which record to which each run is.
    """

    form: Form
    records: Sequence[Printed]
    places: Sequence[int]
    bars: Bars
    runs: Sequence[RunOfText]


class Console:
    """A text in which somebody printed numbers, in one of `FORMS`."""

    def detect(self, path: Path) -> str | None:
        """Look for a line with numbers of a training."""
        if path.name in _OF_WANDB:
            return None
        if path.name == "README.md" and any((path.parent / name).exists() for name in _OF_A_TRAINING):
            return None
        first, form = _looked_at(path)
        if first.startswith("[{") or (first.startswith("{") and reading.parse(first.encode()) is not None):
            # JSON is read as JSON: its lines may be rollouts.
            return None
        is_of_document = form is ANY_DICT and first == "{" and _is_of_document(path)
        return None if form is None or is_of_document else form.title

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the numbers of one run, with their steps."""
        yield from entries_of_text(read_once(_read, source, notes), notes)


def _read(source: Source, notes: LogNotes) -> Text:
    _, form = _looked_at(Path(source.path))
    if form is None:
        raise InputError(f"{source.name}: no line with numbers of a training is there")
    return text_of(lines_of(source, notes.tell), form, notes)


@kept(32)
def _looked_at(path: Path) -> tuple[str, Form | None]:
    """Return the first line that has anything, and the form."""
    text = beginning(path)
    # What a collector of logs has put into objects is text all the same.
    return next((line for line in text if line.strip()), "").strip(), form_of(text)


def _is_of_document(path: Path) -> bool:
    """Tell dicts that are within a JSON document: what it nests beside them is not of steps."""
    if path.stat().st_size > _LARGEST:
        return False
    body = reading.document(path.read_bytes())
    return isinstance(body, dict) and any(isinstance(value, dict) for value in body.values())


_LARGEST = 2**24
"""Bytes of a file that is parsed to find out whether it is JSON."""


def text_of(lines: Iterable[str], form: Form, notes: LogNotes) -> Text:
    """Return the numbers of a text; `notes` takes the environment that it says."""
    bars = Bars()
    records: list[Printed] = []
    places: list[int] = []
    for record in form.records(bars.watched(_environments(lines, notes), records)):
        records.append(record)
        places.append(bars.lines)
    usual = {each for record in records if record.step is not None for each in record.values}
    chosen = [
        place
        for place, record in enumerate(records)
        if record.step is not None or 2 * len(record.values.keys() & usual) > len(record.values)
    ]
    if form in ANY_NAMES and len(chosen) < len(records) <= 2 * len(chosen):
        # What nothing counts, and has other names, is of responses where most lines are counted.
        records, places = [records[at] for at in chosen], [places[at] for at in chosen]
        bars = bars.at(chosen)
    return Text(form, records, places, bars, runs_in(records))


def entries_of_text(text: Text, notes: LogNotes) -> Iterator[Entry]:
    """Yield the numbers of one run of a text, with the steps that lines, progress bars or their order give."""
    first, after = notes.chosen(text.runs)
    notes.begins = (text.places[first - 1] if first else 0, text.places[first]) if text.places else None
    records = text.records[first:after]
    for record in records:
        notes.planned(record.total_steps)
    rows = numbered(records, text.bars.between(first, after), notes, growing=reading.is_growing())
    for row, where in means_of_steps(rows, notes) if text.form in ANY_NAMES else rows:
        yield from entries_of(row, where, notes)
    for sentence in text.form.remarks:
        notes.say(sentence)


def _environments(text: Iterable[str], notes: LogNotes) -> Iterator[str]:
    for line in text:
        notes.environment = notes.environment or environment_in(line)
        yield line

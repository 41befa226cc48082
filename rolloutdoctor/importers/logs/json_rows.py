"""JSON of logged numbers: an object on each line, or one document.

The first are verl's file logger and metrics.jsonl of prime-rl and tinker-cookbook, the second is the state of the
transformers Trainer under any name, or a list of rows.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolloutdoctor.importers.logs.csv_table import DOWNLOADED, tag_of
from rolloutdoctor.importers.logs.kinds_of_rows import NUMBERS, are_of_steps, is_history, kind_of_rows, steps_by_counter
from rolloutdoctor.importers.logs.notes import LogNotes, read_once
from rolloutdoctor.importers.logs.numbers import Entry, is_list, is_number
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.printed import dict_in, values_of
from rolloutdoctor.importers.logs.row_shapes import plain, without_excerpts
from rolloutdoctor.importers.logs.rows import LONG, STEPS, counter_of
from rolloutdoctor.importers.logs.rows_of_document import rows_of
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.results.errors import DataError, InputError

_LOOKED_AT = 16
"""Objects at the beginning of a file."""

_LARGEST = 256 * 2**20
_EXPECTED = "give the file that the Trainer wrote"
_SEVERAL = 2
_HISTORY = "log_history"
_FLAT = re.compile(rb"\{[^{}]{1,100000}\}")
"""An object that holds no other, as the rows of a document that was cut."""

_BEGINS = re.compile(rb"\s*[\[{]\s*[{\"]")


class JsonLines:
    """An object on each line, with a step and numbers. Lines that are cut, elided or none are left out, and counted."""

    def detect(self, path: Path) -> str | None:
        """Look at the first objects: before its numbers a loop may write its configuration, or an evaluation."""
        if path.name.endswith(".metrics.jsonl") or not path.is_file():
            return None
        rows, _ = steps_by_counter(lines.first_objects(path, _LOOKED_AT, repeats=True))
        samples = [*map(without_excerpts, rows)]
        is_log = are_of_steps(rows) or are_of_steps(samples, of_samples=True)
        # A list under a name that nobody knows may have a number for each token.
        is_log = is_log and all(any(map(is_metric, row)) and all(map(is_number, row.values())) for row in samples)
        return kind_of_rows(rows) or (NUMBERS if is_log else None)

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield every line that is whole."""
        yield from entries_of_rows(read_once(_rows_of_lines, source, notes), notes)


def _rows_of_lines(source: Source, notes: LogNotes) -> Sequence[Row]:
    """Return the rows, each with its step."""
    is_tracker = is_history(lines.first_object(Path(source.path)) or {})
    read = [*_objects(source, notes)]
    rows, counter = steps_by_counter([row for row, _ in read])
    if counter:
        notes.say(f"the lines name no step; {counter}, which counts them, is taken for it")
    return [
        (row if is_tracker else plain(without_excerpts(row)), where) for row, (_, where) in zip(rows, read, strict=True)
    ]


def _objects(source: Source, notes: LogNotes) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a file, and where each is."""
    broken: list[int] = []
    cut: list[int] = []
    twice: dict[str, list[int]] = {}
    named, steps = "", list[int]()
    without: dict[int, dict[str, object]] = {}
    for chunk in lines.chunks([source]):
        for number, raw in enumerate(chunk.raw.split(b"\n"), start=chunk.first):
            row, repeated = lines.without_repeats(raw.removeprefix(b"\xef\xbb\xbf"))
            for name in repeated:
                twice.setdefault(name, []).append(number)
            if {*repeated} & LONG:
                continue
            if row is None and raw.strip():
                row = _whole_pairs(raw)
                (broken if row is None else cut).append(number)
                if row is not None and counter_of(row) is None:
                    without[number] = row
                    continue
            if row is not None:
                # Where others follow it, nothing says which step a line is of.
                broken += without
                without.clear()
                if (counted := counter_of(row)) is not None:
                    named, steps = counted[0], [*steps[-1:], counted[1]]
                yield row, f"{source.name}, line {number}"
    if steps and len(without) == 1:
        ((number, row),) = without.items()
        without.clear()
        following = steps[-1] + (steps[-1] - steps[0] or 1)
        notes.tell(f"{source.name}, line {number}: its step was cut off, and is taken to be {following}")
        yield {**row, named: following}, f"{source.name}, line {number}"
    broken = sorted([*broken, *without])
    for name, numbers in twice.items():
        count = f"line {numbers[0]:,}" if len(numbers) == 1 else f"{len(numbers):,} lines (line {numbers[0]:,})"
        notes.say(f"{name} is there twice with two values in {count}, and left out there")
    for odd, treatment in ((broken, "left out"), ([*set(cut) - set(broken)], "read up to where it is cut off")):
        if odd:
            count = (
                "1 line is not a complete JSON object"
                if len(odd) == 1
                else f"{len(odd):,} lines are not complete JSON objects"
            )
            notes.say(f"{count}, and {treatment} (line {min(odd):,})")


def _whole_pairs(raw: bytes) -> dict[str, object] | None:
    """Return the names and numbers of an object that was cut, before the cut; None if there are no two."""
    is_cut = raw.lstrip().startswith(b"{") and not raw.rstrip().endswith(b"}")
    pairs = dict_in(raw.decode(errors="replace")) if is_cut else None
    row: dict[str, object] = {**values_of(pairs or {})}
    row |= {name: int(text) for name, text in (pairs or {}).items() if name in STEPS and text.isdecimal()}
    return row if len(row) > 1 else None


class JsonDocument:
    """An object with `log_history`, a list of objects with a step, or lists of numbers: a column each, by name.

    ``TrainerState.save_to_json`` (transformers/trainer_callback.py) writes the first as trainer_state.json.
    """

    def detect(self, path: Path) -> str | None:
        """Parse a document whose first character opens an object or a list."""
        if not path.is_file() or not _opens_document(path):
            return None
        try:
            body = _document(Source.of(str(path)), LogNotes())
        except InputError:
            return None
        if _history(body) is not None:
            return "the log of the transformers Trainer"
        return "a list of logged numbers" if rows_of(body)[0] else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows of the list."""
        yield from entries_of_rows(read_once(_rows_of_document, source, notes), notes, is_printed=True)


def _rows_of_document(source: Source, notes: LogNotes) -> Sequence[Row]:
    body = _document(source, notes)
    history = _history(body)
    if isinstance(body, dict) and history is not None:
        notes.planned(body.get("max_steps"))
        if not all(isinstance(row, dict) for row in history):
            raise DataError(f"{source.name}: {_HISTORY} holds something that is not an object")
    rows, is_counted = rows_of(body) if history is None else (history, False)
    of = "" if history is None else f" of {_HISTORY}"
    if is_counted:
        notes.say("its lists have no step: their places are counted from 1")
        notes.counted_steps = True
    return [(row, f"{source.name}, row {number}{of}") for number, row in enumerate(rows, start=1)]


def _history(body: object) -> list[dict[str, object]] | None:
    """Return `log_history` of the transformers Trainer; None if a document has none."""
    history = body.get(_HISTORY) if isinstance(body, dict) else None
    return history if isinstance(history, list) else None


def _opens_document(path: Path) -> bool:
    """Tell a file that may be one JSON document: it opens an object or a list, and has no object on each line."""
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return False
    return start[:1] in (b"{", b"[") and len(lines.first_objects(path, 2)) < _SEVERAL


def _document(source: Source, notes: LogNotes) -> dict[str, object] | Sequence[object]:
    """Return the document; of one that is not whole the rows that are.

    Raises:
        InputError: if it is none.
    """
    raw = read_small_bytes(source.path, name=source.name, expected=_EXPECTED, most=_LARGEST, error=InputError)
    body, repeated = lines.document_without_repeats(raw)
    if repeated:
        notes.say(f"{', '.join(repeated)}: there twice with two values, and left out there")
    if body is None and _BEGINS.match(raw):
        rows = (lines.without_repeats(match[0])[0] for match in _FLAT.finditer(raw))
        body = [row for row in rows if row is not None and any(row.get(name) is not None for name in STEPS)]
        notes.say(f"not a whole JSON document: the {len(body):,} rows that are whole are read")
    if isinstance(body, list) and (is_list(body) or all(is_list(row) and len(row) == len(DOWNLOADED) for row in body)):
        body = {tag_of(source.name): [row[1:] if isinstance(row, list) else row for row in body]}
    if not isinstance(body, (dict, list)):
        raise InputError(f"{source.name}: not JSON with a list log_history; {_EXPECTED}")
    return body

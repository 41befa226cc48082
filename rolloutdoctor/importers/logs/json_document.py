"""A JSON document of logged numbers: the state of the transformers Trainer under any name, or a list of rows."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rolloutdoctor.importers.logs.csv_table import DOWNLOADED, tag_of
from rolloutdoctor.importers.logs.kinds_of_rows import Rows
from rolloutdoctor.importers.logs.notes import LogNotes, read_once
from rolloutdoctor.importers.logs.numbers import Entry, is_list
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.rows import STEPS
from rolloutdoctor.importers.logs.rows_of_document import rows_of
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import DataError, InputError

_LARGEST = 256 * 2**20
_SEVERAL = 2
_HISTORY = "log_history"
_FLAT = re.compile(rb"\{[^{}]{1,100000}\}")
"""An object that holds no other, as the rows of a document that was cut."""

_BEGINS = re.compile(rb"\s*[\[{]\s*[{\"]")


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
        if isinstance(body, dict) and isinstance(body.get(_HISTORY), list):
            return "the log of the transformers Trainer"
        return "a list of logged numbers" if rows_of(body)[0] else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows of the list."""
        yield from entries_of_rows(read_once(_read, source, notes), source.name, notes, is_printed=True)


def _read(source: Source, notes: LogNotes) -> Sequence[Row]:
    body = _document(source, notes)
    if isinstance(body, dict) and _HISTORY in body:
        notes.planned(body.get("max_steps"))
        rows, is_counted, of = _history(body[_HISTORY], source.name), False, f" of {_HISTORY}"
    else:
        (rows, is_counted), of = rows_of(body), ""
    if is_counted:
        notes.tell(f"{source.name}: its lists have no step: their places are counted from 1")
        notes.counted_steps = True
    return [(row, f"{source.name}, row {number}{of}") for number, row in enumerate(rows, start=1)]


def _history(rows: object, name: str) -> Rows:
    """Return `log_history` of the transformers Trainer."""
    if not isinstance(rows, list):
        raise InputError(f"{name}: not JSON with a list {_HISTORY}; give the file that the Trainer wrote")
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{name}: {_HISTORY} holds something that is not an object")
    return rows


def _opens_document(path: Path) -> bool:
    """True if a file may be one JSON document: it opens an object or a list, and has no object on each line."""
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
    path = Path(source.path)
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{source.name}: larger than {_LARGEST >> 20} MiB; that is no trainer_state.json")
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    body, repeated = lines.document_without_repeats(raw)
    if repeated:
        notes.tell(f"{source.name}: {', '.join(repeated)}: there twice with two values, and left out there")
    if body is None and _BEGINS.match(raw):
        found = (lines.without_repeats(match[0])[0] for match in _FLAT.finditer(raw))
        body = [row for row in found if row is not None and any(row.get(name) is not None for name in STEPS)]
        notes.tell(f"{source.name}: not a whole JSON document: the {len(body):,} rows that are whole are read")
    if isinstance(body, list) and (is_list(body) or all(is_list(one) and len(one) == len(DOWNLOADED) for one in body)):
        body = {tag_of(source.name): [one[1:] if isinstance(one, list) else one for one in body]}
    if not isinstance(body, (dict, list)):
        raise InputError(f"{source.name}: not JSON with a list log_history; give the file that the Trainer wrote")
    return body

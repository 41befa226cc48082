"""A JSON document of logged numbers: the state of the transformers Trainer under any name, or a list of rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry
from rolloutdoctor.importers.logs.json_lines import kind_of_row
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Cell, is_number, numbers
from rolloutdoctor.importers.logs.printed import is_log_line
from rolloutdoctor.importers.logs.row_names import STEPS
from rolloutdoctor.importers.logs.rows import entries_of
from rolloutdoctor.importers.logs.runs_of_rows import Row, of_one_run
from rolloutdoctor.importers.reading import cells, lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import DataError, InputError

_LARGEST = 256 * 2**20
_HISTORY = "log_history"
_TRAINER = {"epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "reward", "kl"}
"""Names that the transformers Trainer and TRL log; a row of `log_history` has some of them beside its step."""


class JsonDocument:
    """An object with `log_history`, a list of objects with a step, or lists of numbers by name: a column each.

    ``TrainerState.save_to_json`` (transformers/trainer_callback.py) writes the first as trainer_state.json.
    """

    def detect(self, path: Path) -> str | None:
        """Parse a document whose first character opens an object or a list."""
        if not path.is_file() or not _opens_document(path):
            return None
        try:
            body = _document(Source.of(str(path)))
        except InputError:
            return None
        if isinstance(body, dict) and isinstance(body.get(_HISTORY), list):
            return "the log of the transformers Trainer"
        rows, _ = _rows(body)
        first = next((row for row in rows if isinstance(row, dict)), {})
        is_of_numbers = isinstance(body, dict) and all(map(is_number, first.values())) and is_log_line(first)
        is_log = is_of_numbers or ("step" in first and len(_TRAINER & first.keys()) > 1)
        return "a list of logged numbers" if is_log or kind_of_row(first) is not None else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows of the list."""
        body = _document(source)
        if isinstance(body, dict) and _HISTORY in body:
            notes.planned(body.get("max_steps"))
            yield from trainer_state_entries(source)
            return
        rows, is_counted = _rows(body)
        if is_counted:
            notes.tell(f"{source.name}: its lists have no step: their places are counted from 1")
        placed: list[Row] = []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise DataError(f"{source.name}, row {number}: not an object; log an object of names and numbers")
            placed.append((row, f"{source.name}, row {number}"))
        for named, where in of_one_run(placed, source.name, notes):
            if _TRAINER & named.keys() and "step" in named:
                yield from trainer_entries(named, where)
            else:
                yield from entries_of(named, where, notes)


def _rows(body: object) -> tuple[Sequence[object], bool]:
    """Return the rows of a document, and whether they are lists of numbers without a step, which is counted then."""
    if isinstance(body, list):
        return body, False
    if not isinstance(body, dict):
        return [], False
    lists = {name: cells for name, cells in body.items() if isinstance(cells, list)}
    columns = {name: column for name, column in lists.items() if column and all(map(is_number, column))}
    length = max(map(len, columns.values()), default=0)
    columns = {name: column for name, column in columns.items() if len(column) == length}
    if length and is_log_line(columns):
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        is_counted = not any(name in columns for name in STEPS)
        return [{"step": n, **row} if is_counted else row for n, row in enumerate(rows, start=1)], is_counted
    # A single list of objects, such as that under "history".
    tables = [rows for rows in lists.values() if rows and all(isinstance(row, dict) for row in rows)]
    return (tables[0], False) if len(tables) == 1 else ([], False)


def trainer_state_entries(source: Source) -> Iterator[Entry]:
    """Yield `log_history` of the transformers Trainer; ``eval_`` means split eval.

    Raises:
        InputError: if it is not such a file.
    """
    body = _document(source)
    history = body.get(_HISTORY) if isinstance(body, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{source.name}: not JSON with a list log_history; give the file that the Trainer wrote")
    for number, row in enumerate(history, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{source.name}: log_history holds something that is not an object")
        yield from trainer_entries(row, f"{source.name}, row {number} of log_history")


def trainer_entries(row: Mapping[str, object], where: str) -> Iterator[Entry]:
    """Yield what the transformers Trainer logged with one call; a value of an evaluation begins with ``eval_``."""
    step = cells.natural(dict(row), "step", where)
    splits: dict[str, dict[str, Cell]] = {}
    for name, value in numbers({name: value for name, value in row.items() if name != "step"}, where).items():
        splits.setdefault(EVAL if name.startswith("eval_") else TRAIN, {})[name.removeprefix("eval_")] = value
    for split, values in splits.items():
        yield step, split, values


def _opens_document(path: Path) -> bool:
    """True if a file may be one JSON document: its first line is no object by itself, or that with `log_history`."""
    first = lines.first_object(path)
    if first is not None:
        return _HISTORY in first or bool(_rows(first)[0])
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return False
    return start[:1] in (b"{", b"[")


def _document(source: Source) -> dict[str, object] | Sequence[object]:
    path = Path(source.path)
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{source.name}: larger than {_LARGEST >> 20} MiB; that is no trainer_state.json")
        body = lines.document(path.read_bytes())
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    if not isinstance(body, (dict, list)):
        raise InputError(f"{source.name}: not JSON with a list log_history; give the file that the Trainer wrote")
    return body

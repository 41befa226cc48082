"""A JSON document of logged numbers: the state of the transformers Trainer under any name, or a list of rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry, LogNotes, as_float, entries_of, is_number
from rolloutdoctor.importers.logs.json_lines import kind_of_row
from rolloutdoctor.importers.reading import cells, lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import DataError, InputError

_LARGEST = 256 * 2**20
_HISTORY = "log_history"
_TRAINER = {"epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "reward", "kl"}
"""Names that the transformers Trainer and TRL log; a row of `log_history` has some of them beside its step."""


class JsonDocument:
    """An object with `log_history`, or a list of objects with a step.

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
        if isinstance(body, dict):
            return "the log of the transformers Trainer" if isinstance(body.get(_HISTORY), list) else None
        first = next((row for row in body if isinstance(row, dict)), {})
        is_log = "step" in first and len(_TRAINER & first.keys()) > 1
        return "a list of logged numbers" if is_log or kind_of_row(first) is not None else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows of the list."""
        body = _document(source)
        if isinstance(body, dict):
            notes.planned(body.get("max_steps"))
            for (step, split), values in read_trainer_state(source).items():
                yield step, split, dict(values)
            return
        for number, row in enumerate(body, start=1):
            if not isinstance(row, dict):
                raise DataError(f"{source.name}, row {number}: not an object; log an object of names and numbers")
            if _TRAINER & row.keys():
                yield from trainer_entries(row, f"{source.name}, row {number}")
            else:
                yield from entries_of(row, f"{source.name}, row {number}", notes)


def read_trainer_state(source: Source) -> Mapping[tuple[int, str], Mapping[str, float | None]]:
    """Read `log_history` of the transformers Trainer: step and split to numbers; ``eval_`` means split eval.

    Raises:
        InputError: if it is not such a file.
    """
    body = _document(source)
    history = body.get(_HISTORY) if isinstance(body, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{source.name}: not JSON with a list log_history; give the file that the Trainer wrote")
    found: dict[tuple[int, str], dict[str, float | None]] = {}
    for row in history:
        if not isinstance(row, dict):
            raise DataError(f"{source.name}: log_history holds something that is not an object")
        for step, split, values in trainer_entries(row, f"{source.name}, log_history"):
            found.setdefault((step, split), {}).update(values)
    return found


def trainer_entries(row: Mapping[str, object], where: str) -> Iterator[Entry]:
    """Yield what the transformers Trainer logged with one call; a value of an evaluation begins with ``eval_``."""
    step = cells.natural(dict(row), "step", where)
    for name, value in row.items():
        if name != "step" and is_number(value):
            split = EVAL if name.startswith("eval_") else TRAIN
            yield step, split, {name.removeprefix("eval_"): as_float(value)}


def _opens_document(path: Path) -> bool:
    """True if a file may be one JSON document: its first line is no object by itself, or that with `log_history`."""
    first = lines.first_object(path)
    if first is not None:
        return _HISTORY in first
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

"""The folder of a wandb run on the machine that trained, offline or not: what `run.log` was given."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import intern

from rolloutdoctor.importers.logs.base import Entry, LogNotes, Tell, entries_of_tracker
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.wandb_records import MAGIC, fields, records
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError, SeveralRunsError

_HISTORY, _CONFIG, _RUN = 2, 5, 17
"""Fields of ``Record`` (wandb/proto/wandb_internal.proto)."""

_ITEM, _STEP, _RUN_CONFIG = 1, 2, 4
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16

_LONGEST_NUMBER = 32
"""Bytes of a number in JSON, or of a name for one that is not finite."""


_Fields = dict[int, list[bytes | int]]


class WandbRun:
    """A run-*.wandb file, the folder of a run that holds one, or the folder wandb/ of a single run."""

    def detect(self, path: Path) -> str | None:
        """Look at the first bytes of the file."""
        return "the folder of a wandb run" if _files(path) else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the history of the run.

        Raises:
            InputError: if the file cannot be read.
            SeveralRunsError: if the folder holds several runs.
        """
        with _reading(source):
            rows = list(_history(source, notes.tell))
        yield from entries_of_tracker(rows, source.name, notes)


def wandb_config(source: Source) -> dict[str, object]:
    """Return the config of a wandb run, as `wandb.init` and `run.config` were given it; without wandb's own keys.

    Raises:
        InputError: if the file cannot be read.
        SeveralRunsError: if the folder holds several runs.
    """
    found: dict[str, object] = {}
    with _reading(source):
        for record in _records(source, lambda sentence: None):
            inner = (config for run in _texts(record, _RUN) for config in _texts(fields(run), _RUN_CONFIG))
            configs = map(fields, (*inner, *_texts(record, _CONFIG)))
            for names, value in (_item(item) for config in configs for item in _texts(config, _ITEM)):
                into = found
                for name in names[:-1]:
                    deeper = into.setdefault(name, {})
                    into = deeper if isinstance(deeper, dict) else {}
                if names:
                    into[names[-1]] = lines.document(value)
    return {name: value for name, value in found.items() if name != "_wandb"}


def _only(source: Source) -> Path:
    files = _files(Path(source.path))
    if not files:
        raise InputError(f"{source.name}: no run-*.wandb file is there")
    if len(files) > 1:
        folders = ", ".join(file.parent.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise SeveralRunsError(
            f"{source.name}: {len(files)} wandb runs ({folders}); give the folder of one, or check them with --each"
        )
    return files[0]


def _files(path: Path) -> list[Path]:
    """The run files that `path` is, or holds."""
    try:
        found = (
            [path] if path.is_file() else sorted(path.glob("run-*.wandb")) or sorted(path.glob("*run-*/run-*.wandb"))
        )
        return [file for file in found if file.is_file() and _begins(file)]
    except OSError:
        return []


def _begins(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _records(source: Source, tell: Tell) -> Iterator[_Fields]:
    """The fields of each record that is whole."""
    offsets: list[int] = []
    with _only(source).open("rb") as stream:
        yield from map(fields, records(stream, offsets.append))
    if offsets:
        tell(
            f"{source.name}: a record is not whole (byte {offsets[0]:,}): the run goes on, or the file is damaged; "
            "the others were read"
        )


@contextmanager
def _reading(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{source.name}: not a readable wandb run ({error}); copy it again") from None


def _history(source: Source, tell: Tell) -> Iterator[dict[str, object]]:
    step = -1
    for history in (fields(body) for record in _records(source, tell) for body in _texts(record, _HISTORY)):
        # A row without a step, which wandb gives it when it is sent, has the next.
        step += 1
        for body in _texts(history, _STEP):
            step = next((number for number in fields(body).get(1, ()) if isinstance(number, int)), 0)
        row: dict[str, object] = {"_step": step}
        for names, text in map(_item, _texts(history, _ITEM)):
            if names and len(text) <= _LONGEST_NUMBER:
                row[intern("/".join(names))] = json.loads(text.decode())
        yield row


def _texts(found: _Fields, number: int) -> list[bytes]:
    """The messages or texts in the fields of one number."""
    return [body for body in found.get(number, ()) if isinstance(body, bytes)]


def _item(message: bytes) -> tuple[list[str], bytes]:
    """The name of an item, by its parts, and its value in JSON."""
    found = fields(message)
    names = _texts(found, _NESTED_KEY) or _texts(found, _KEY)
    return [name.decode() for name in names], b"".join(_texts(found, _VALUE)[-1:]) or b"null"

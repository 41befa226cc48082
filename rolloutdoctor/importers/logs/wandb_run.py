"""The folder of a wandb run on the machine that trained, offline or not: what `run.log` was given."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from sys import intern

from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.notes import LogNotes, Tell
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.wandb_records import MAGIC, fields, records
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.results.errors import InputError, SeveralRunsError

_OF_RUN = re.compile(r"(offline-)?run-[0-9]")
_HISTORY, _CONFIG, _RUN = 2, 5, 17
"""Fields of ``Record`` (wandb/proto/wandb_internal.proto)."""

_ITEM, _STEP, _RUN_CONFIG = 1, 2, 4
_KEY, _NESTED_KEY, _VALUE = 1, 2, 16

_LOG, _SUMMARY = "output.log", "wandb-summary.json"

_LONGEST_NUMBER = 32
"""Bytes of a number in JSON, or of a name for one that is not finite."""


_Fields = dict[int, list[bytes | int]]


class WandbRun:
    """A run-*.wandb file, the folder of a run that holds one, or the folder wandb/ of a single run.

    Where the file is missing, above the size that a host takes or ignored by git, what wandb keeps beside it is read:
    the console in ``files/output.log``, else the last values in ``files/wandb-summary.json``.
    """

    def detect(self, path: Path) -> str | None:
        """Look at the first bytes of the file, and for what is kept beside it."""
        return "the folder of a wandb run" if _runs(path) else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the history of the run.

        Raises:
            InputError: if the file cannot be read.
            SeveralRunsError: if the folder holds several runs.
        """
        run = _only(source)
        if run.is_file():
            notes.file = str(run)
            with _reading(source):
                rows = list(_history(source, notes.tell))
            if any(len(row) > 1 for row in rows) or not _has_numbers(run.parent):
                records = [(row, f"{source.name}, record {number}") for number, row in enumerate(rows, start=1)]
                yield from entries_of_rows(records, notes)
                return
            run, lacks = run.parent, "has no numbers"
        else:
            lacks = "is not there"
        log, summary = (run / "files" / name for name in (_LOG, _SUMMARY))
        console, missing = Console(), f"{source.name}: the history (run-*.wandb) {lacks}"
        if console.detect(log) is not None:
            notes.tell(f"{missing}: the run's console log, files/{_LOG}, is read instead")
            notes.file = str(log)
            notes.name = f"{source.name}/files/{_LOG}"
            yield from console.read(Source(str(log), notes.name), notes)
            return
        row = lines.document(read_small_bytes(summary, expected=f"{missing}; give another log")) or {}
        notes.tell(f"{missing}: the last values, files/{_SUMMARY}, are read instead")
        yield from entries_of_rows([(row, source.name)] if isinstance(row, dict) else [], notes)


def wandb_config(source: Source) -> dict[str, object]:
    """Return the config of a wandb run, as `wandb.init` and `run.config` were given it; without wandb's own keys.

    Raises:
        InputError: if the file cannot be read.
        SeveralRunsError: if the folder holds several runs.
    """
    options: dict[str, object] = {}
    with _reading(source):
        for record in _records(source, lambda sentence: None):
            inner = (config for run in _texts(record, _RUN) for config in _texts(fields(run), _RUN_CONFIG))
            configs = map(fields, (*inner, *_texts(record, _CONFIG)))
            for names, value in (_item(item) for config in configs for item in _texts(config, _ITEM)):
                into = options
                for name in names[:-1]:
                    deeper = into.setdefault(name, {})
                    into = deeper if isinstance(deeper, dict) else {}
                if names:
                    into[names[-1]] = lines.document(value)
    return {name: value for name, value in options.items() if name != "_wandb"}


def _only(source: Source) -> Path:
    """The run-*.wandb file that is meant, or the folder of a run without one."""
    runs = _runs(Path(source.path))
    if not runs:
        raise InputError(f"{source.name}: no run-*.wandb file is there")
    if len(runs) > 1:
        names = [(run.parent if run.is_file() else run).name for run in runs[:3]]
        shown = ", ".join(names) + (", ..." if len(runs) > 3 else "")
        raise SeveralRunsError(
            f"{source.name}: {len(runs)} wandb runs ({shown}); give the folder of one, or check them with --each"
        )
    return runs[0]


def _runs(path: Path) -> list[Path]:
    """The runs that `path` is, or holds: their files, or the folders of those that have none."""
    try:
        if path.is_file():
            return [path] if _begins(path) else []
        runs = _run_in(path)
        return runs or [run for folder in sorted(path.glob("*run-*")) for run in _run_in(folder)]
    except OSError:
        return []


def _run_in(folder: Path) -> list[Path]:
    # wandb writes it into the folder of the run; people keep it in one below, too.
    candidates = sorted(folder.glob("run-*.wandb")) or sorted(
        folder.glob("*/run-*.wandb") if _OF_RUN.match(folder.name) else ()
    )
    files = [file for file in candidates if file.is_file() and _begins(file)]
    if files or not any((folder / "files" / name).is_file() for name in (_LOG, _SUMMARY)):
        return files
    return [folder] if _has_numbers(folder) else []


def _has_numbers(folder: Path) -> bool:
    """Tell the folder of a run that has numbers beside the history."""
    return bool(Console().detect(folder / "files" / _LOG)) or (folder / "files" / _SUMMARY).is_file()


def _begins(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def _records(source: Source, tell: Tell) -> Iterator[_Fields]:
    """The fields of each record that is whole."""
    offsets: list[int] = []
    run = _only(source)
    if run.is_dir():
        return
    with run.open("rb") as stream:
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


def _texts(parts: _Fields, number: int) -> list[bytes]:
    """The messages or texts in the fields of one number."""
    return [body for body in parts.get(number, ()) if isinstance(body, bytes)]


def _item(message: bytes) -> tuple[list[str], bytes]:
    """The name of an item, by its parts, and its value in JSON."""
    parts = fields(message)
    names = _texts(parts, _NESTED_KEY) or _texts(parts, _KEY)
    return [name.decode() for name in names], b"".join(_texts(parts, _VALUE)[-1:]) or b"null"

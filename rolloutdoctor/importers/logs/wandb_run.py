"""The offline folder of a wandb run: its history through wandb's own reader, where the installed version has one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rolloutdoctor.importers.logs.base import Entry, Tell, entries_of
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.results.errors import InputError

_MAGIC = b":W&B"
_SUMMARY = "files/wandb-summary.json"


class WandbRun:
    """A run-*.wandb file, or the folder that holds one.

    ``DataStore`` (wandb/sdk/internal/datastore.py) reads and writes it; versions from 0.30 on have no reader in
    Python any more.
    """

    def detect(self, path: Path) -> str | None:
        """Look at the first bytes of the file."""
        return "the offline folder of a wandb run" if _file(path) is not None else None

    def read(self, source: Source, tell: Tell) -> Iterator[Entry]:
        """Yield the history of the run.

        Raises:
            InputError: if no reader is installed, with what the folder's summary says.
        """
        file = _file(Path(source.path))
        if file is None:
            raise InputError(f"{source.name}: no run-*.wandb file is there")
        for number, row in enumerate(_history(file, source), start=1):
            yield from entries_of(row, f"{source.name}, record {number}")


def _file(path: Path) -> Path | None:
    """The run file that `path` is, or holds."""
    try:
        files = sorted(path.glob("run-*.wandb")) if path.is_dir() else [path]
        for file in filter(Path.is_file, files):
            with file.open("rb") as stream:
                if stream.read(len(_MAGIC)) == _MAGIC:
                    return file
    except OSError:
        return None
    return None


def _history(file: Path, source: Source) -> Iterator[dict[str, object]]:
    try:
        from wandb.proto import wandb_internal_pb2
        from wandb.sdk.internal.datastore import DataStore
    except ImportError:
        raise InputError(_without_reader(file, source)) from None
    store: Any = DataStore()
    try:
        _open_for_scan(store, file)
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            items = record.history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            if row:
                row.setdefault("_step", record.history.step.num)
                yield row
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except Exception as error:  # wandb's reader asserts, and protobuf raises errors of its own
        kind = type(error).__name__
        raise InputError(f"{source.name}: not a readable wandb run ({kind}); copy it again") from None
    finally:
        store.close()


def _open_for_scan(store: Any, file: Path) -> None:  # noqa: ANN401 - wandb's DataStore
    """Begin to read, as `DataStore.open_for_scan`, which opens to write too: a file system may be read-only."""
    store._fname, store._fp = str(file), file.open("rb")
    store._index, store._size_bytes, store._opened_for_scan = 0, file.stat().st_size, True
    store._read_header()


def _without_reader(file: Path, source: Source) -> str:
    words = (
        f"{source.name}: a wandb run, which takes a wandb package that can read it; "
        "pip install 'rolloutdoctor[wandb]', or export its history as CSV or JSON Lines"
    )
    summary = file.parent / _SUMMARY
    if not summary.exists():
        return words
    try:
        names = sorted(json.loads(read_small(str(summary), expected="")))
    except (InputError, ValueError):
        return words
    logged = [name for name in names if not name.startswith("_")]
    return f"{words}; its summary has the last values alone, of {', '.join(logged[:6])}" + (
        f" and {len(logged) - 6} more" if len(logged) > 6 else ""
    )

"""Every format of logged numbers, in the order in which they are asked whether a file is theirs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from rolloutdoctor.importers.logs.console import Console
from rolloutdoctor.importers.logs.csv_table import CsvTable
from rolloutdoctor.importers.logs.json_rows import JsonDocument, JsonLines
from rolloutdoctor.importers.logs.mlflow_run import MlflowRun
from rolloutdoctor.importers.logs.notebook import NotebookOutputs
from rolloutdoctor.importers.logs.notes import LogNotes, forget
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.parquet_history import ParquetHistory
from rolloutdoctor.importers.logs.tensorboard import TensorboardEvents
from rolloutdoctor.importers.logs.trackio_project import TrackioProject, trackio_runs
from rolloutdoctor.importers.logs.wandb_run import WandbRun
from rolloutdoctor.importers.reading.unchanged import kept
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError

_MOST_DIGITS = 4
"""Of the number of a run in a file."""

_OF_MODELS = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "model.safetensors.index.json", "pytorch_model.bin.index.json"),
    }
)
"""Files that transformers saves beside a model: megabytes of words, which every format would look through."""


class LogFormat(Protocol):
    """One way in which programs write logged numbers. The docstring names the upstream function that writes them."""

    def detect(self, path: Path) -> str | None:
        """Say what `path`, a file or a folder, is; None if it is not of this format. Reads little, and not the name."""
        ...

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what was logged, in file order; `notes` takes what was assumed, and the length of the run.

        Raises:
            InputError: if it is not what it looks like.
        """
        ...


FORMATS: tuple[LogFormat, ...] = (
    TensorboardEvents(),
    WandbRun(),
    MlflowRun(),
    TrackioProject(),
    ParquetHistory(),
    NotebookOutputs(),
    JsonLines(),
    JsonDocument(),
    CsvTable(),
    Console(),
)


def format_of(path: Path) -> tuple[LogFormat, str] | None:
    """Return the format of a log of numbers, and what it is in words; None if it is none."""
    if path.name in _OF_MODELS:
        return None
    detected = _asked_once(path) if path.is_file() else _asked(path)
    file, number = (path, None) if detected is not None else located(path)
    return detected if number is None else format_of(file)


def _asked(path: Path) -> tuple[LogFormat, str] | None:
    return next(((reader, why) for reader in FORMATS if (why := reader.detect(path)) is not None), None)


_asked_once = kept(256)(_asked)


def located(path: Path) -> tuple[Path, int | None]:
    """Return the file of a path, and which of its runs is meant, as in ``train.log/2``; None: the path names none."""
    is_number = path.name.isdecimal() and len(path.name) <= _MOST_DIGITS and not path.exists()
    return (path.parent, int(path.name)) if is_number and path.parent.is_file() else (path, None)


def runs_of(path: Path) -> list[str]:
    """Return the names of the runs in a file that holds several: those of a trackio project, or their numbers.

    Raises:
        InputError: if it cannot be read.
    """
    if not path.is_file() or kind_of(path) is None:
        return []
    if runs := trackio_runs(path):
        return runs
    notes = LogNotes()
    for _ in read_log(Source.of(str(path)), notes):
        pass
    return [str(number) for number in range(1, notes.runs + 1)]


def kind_of(path: Path) -> str | None:
    """Say what log of numbers a file is; None if it is none."""
    detected = format_of(path)
    return None if detected is None else detected[1]


def read_log(source: Source, notes: LogNotes | None = None) -> Iterator[Entry]:
    """Yield the numbers that were logged, in file order: step, split, and value by name.

    Args:
        source: the log.
        notes: takes what was assumed or left out; None: it is dropped.

    Raises:
        InputError: if the file is no log of numbers, or cannot be read.
    """
    detected = format_of(Path(source.path))
    if detected is None:
        raise InputError(f"{source.name}: no log of numbers; give trainer_state.json, CSV, JSON Lines or a console log")
    notes = notes or LogNotes()
    file, number = located(Path(source.path))
    if number is not None and detected[0].detect(Path(source.path)) is None:
        source, notes.run = Source(str(file), source.name.rpartition("/")[0]), number
    notes.name = source.name
    for step, split, values in detected[0].read(source, notes):
        notes.reader.numbers(notes.name, (name for name, value in values.items() if value is not None))
        notes.reader.nulls(notes.name, (name for name, value in values.items() if value is None))
        yield step, split, values
    if notes.runs == 1:
        forget()

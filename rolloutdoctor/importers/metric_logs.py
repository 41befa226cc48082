"""Logged numbers, as trainers and loggers write them; a wandb history is a CSV, JSON Lines or Parquet export."""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from rolloutdoctor.data.batch import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells, lines
from rolloutdoctor.importers.reading.parquet_files import batches
from rolloutdoctor.importers.tensorboard_logs import is_event_file, read_events
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.io.parquet.files import open_parquet, reading
from rolloutdoctor.results.errors import DataError, InputError

Entry = tuple[int, str, dict[str, float | None]]
"""Step, split, and value by name."""

_LARGEST_STATE = 256 * 2**20
_STEPS = (
    "step",
    "global_step",
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "training_step",
    # wandb's own counter, which grows with every call
    "_step",
)
_WANDB = {"_step", "_timestamp"}


def kind_of(path: Path) -> str | None:
    """Say what log of numbers a file is; None if it is none."""
    if path.suffix == ".csv" and path.is_file():
        return "a CSV with a column step" if _csv_step(path) else None
    if is_event_file(path):
        return "a TensorBoard event file"
    if path.suffix == ".parquet" and not path.name.endswith(".metrics.parquet") and path.is_file():
        return "the history of a wandb run" if set(_parquet_names(path)) >= _WANDB else None
    if path.name == "trainer_state.json" and path.is_file():
        return "the log of the transformers Trainer"
    if path.suffix != ".jsonl" or path.name.endswith(".metrics.jsonl") or not path.is_file():
        return None
    first = lines.first_object(path)
    if first is None:
        return None
    if set(first) == {"step", "data"} and isinstance(first["data"], dict):
        return "verl's file logger"
    is_flat = all(value is None or isinstance(value, (bool, int, float, str)) for value in first.values())
    # Rollouts have a reward or a text; a log of numbers has names that nobody gives a rollout.
    if is_flat and any(name in first for name in _STEPS) and _long(first):
        return "JSON Lines of step, name and value"
    if is_flat and any(name in first for name in _STEPS) and any("/" in name for name in first if name not in _STEPS):
        return "JSON Lines of logged numbers"
    return None


def read_log(source: Source) -> Iterator[Entry]:
    """Yield what was logged, in file order.

    Raises:
        InputError: if the file is not what its name says.
    """
    path = Path(source.path)
    if path.suffix == ".csv":
        yield from _csv(source)
    elif path.suffix == ".parquet":
        yield from _parquet(source)
    elif is_event_file(path):
        yield from read_events(source)
    elif path.suffix == ".json":
        for (step, split), values in read_trainer_state(source).items():
            yield step, split, dict(values)
    else:
        for line in lines.objects(source):
            if line.body is not None:
                yield from _row(line.body, line.where)


def read_trainer_state(source: Source) -> Mapping[tuple[int, str], Mapping[str, float | None]]:
    """Read `log_history` of the transformers Trainer: step and split to numbers; ``eval_`` means split eval.

    Written by ``TrainerState.save_to_json`` (transformers/trainer_callback.py).

    Raises:
        InputError: if it is not such a file.
    """
    path = Path(source.path)
    try:
        if path.stat().st_size > _LARGEST_STATE:
            raise InputError(f"{source.name}: larger than {_LARGEST_STATE >> 20} MiB; that is no trainer_state.json")
        body = lines.parse(path.read_bytes())
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    history = None if body is None else body.get("log_history")
    if not isinstance(history, list):
        raise InputError(f"{source.name}: not JSON with a list log_history; give the file that the Trainer wrote")
    found: dict[tuple[int, str], dict[str, float | None]] = {}
    for entry in history:
        if not isinstance(entry, dict):
            raise DataError(f"{source.name}: log_history holds something that is not an object")
        step = cells.natural(entry, "step", f"{source.name}, log_history")
        for name, value in entry.items():
            if name != "step" and _is_number(value):
                split = EVAL if name.startswith("eval_") else TRAIN
                found.setdefault((step, split), {})[name.removeprefix("eval_")] = _float(value)
    return found


def _row(row: Mapping[str, object], where: str) -> Iterator[Entry]:
    data = row.get("data")
    if isinstance(data, dict):
        yield cells.natural(dict(row), "step", where), TRAIN, _numbers(data)
        return
    named = next((name for name in _STEPS if row.get(name) is not None), None)
    if named is None:
        raise DataError(f"{where}: no step; the number of the optimiser step has to be in one of {', '.join(_STEPS)}")
    step = cells.natural(dict(row), named, where)
    if _long(row):
        split = EVAL if row.get("split") == EVAL else TRAIN
        yield step, split, {str(row["name"]): cells.number(row["value"], f"{where}: value")}
        return
    # The transformers Trainer reports to wandb and others as train/kl and eval/kl, beside its own step.
    prefixed = "train/global_step" in row
    splits: dict[str, dict[str, float | None]] = {}
    for name, value in _numbers(row).items():
        if name in _STEPS or name.startswith("_"):
            continue
        split = TRAIN
        if prefixed:
            split = EVAL if name.startswith("eval/") else TRAIN
            name = name.removeprefix("eval/").removeprefix("train/")
        splits.setdefault(split, {})[name] = value
    for split, values in splits.items():
        yield step, split, values


def _parquet_names(path: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names: list[str] = pq.read_schema(path).names
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []
    return names


def _parquet(source: Source) -> Iterator[Entry]:
    """A wandb history: a row for each call, null for what it did not log, and columns of histograms among the rest."""
    from pyarrow import types

    with open_parquet(source) as parquet:
        with reading(source.name, "the footer"):
            schema = parquet.schema_arrow
            plain = [field.name for field in schema if types.is_integer(field.type) or types.is_floating(field.type)]
        named = next((name for name in _STEPS if name in plain), None)
        if named is None:
            raise DataError(f"{source.name}: no step; its number has to be in a column of {', '.join(_STEPS)}")
        number = 0
        for batch in batches(parquet, source, plain):
            for row in batch.to_pylist():
                number += 1
                if row[named] is not None and not math.isnan(row[named]):
                    given = {name: cell for name, cell in row.items() if cell is not None}
                    yield from _row(given, f"{source.name}, row {number}")


def _long(row: Mapping[str, object]) -> bool:
    return {"step", "name", "value"} <= set(row) <= {"step", "name", "value", "split"}


def _csv(source: Source) -> Iterator[Entry]:
    try:
        with Path(source.path).open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(_bounded(file, source.name))
            named = next((name for name in _STEPS if name in (table.fieldnames or ())), None)
            for number, row in enumerate(table, start=2):
                given: dict[str, object] = {}
                for name, cell in row.items():
                    if isinstance(name, str) and isinstance(cell, str) and cell.strip():
                        given[name] = _cell(cell)
                if named in given:
                    yield from _row(given, f"{source.name}, line {number}")
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source.name}: not a CSV in UTF-8 ({error})") from None


def _bounded(file: TextIO, name: str) -> Iterator[str]:
    while line := file.readline(lines.LONGEST_LINE + 1):
        if len(line) > lines.LONGEST_LINE:
            raise InputError(f"{name}: a line is longer than {lines.LONGEST_LINE >> 20} MiB; that is no log of numbers")
        yield line


def _csv_step(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader([file.readline(2**20)]), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return any(name in _STEPS for name in names)


def _cell(text: str) -> object:
    try:
        return int(text) if text.strip().lstrip("+-").isdigit() and len(text) < 20 else float(text)
    except ValueError:
        return text


def _numbers(values: Mapping[str, object]) -> dict[str, float | None]:
    return {name: _float(value) for name, value in values.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _float(value: object) -> float | None:
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf

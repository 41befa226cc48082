"""A CSV of logged numbers, one row a step: what wandb, CSVLogger and spreadsheets export, with commas or semicolons."""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TextIO

from rolloutdoctor.importers.logs.notes import LogNotes, read_once
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.numbers import number as number_in
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.row_shapes import plain
from rolloutdoctor.importers.logs.rows import OF_ROLLOUTS, ROUNDS, RUNS, STEPS, is_log_row, is_of_update, step_of
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_COUNTERS = (*STEPS, *ROUNDS)
"""Columns that number the rows, the best first, in lower case."""

DOWNLOADED = ["Wall time", "Step", "Value"]
"""Columns of a scalar that TensorBoard's page downloads; its tag is in the name of the file, without slashes."""

_EXTREMES = ("__MIN", "__MAX")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


class CsvTable:
    """A CSV with a column of steps, or a chart that wandb's page exported: ``Step,"RUN - METRIC",...``."""

    def detect(self, path: Path) -> str | None:
        """Look at the first line: names between commas, one of them a step's or a metric of an update."""
        names = _head(path)[0] if path.is_file() else []
        if _chart(names):
            return "a chart of wandb as CSV"
        counter = None if {*names} & OF_ROLLOUTS - {"sample_id"} else _counter(names)
        if counter is None and len(names) > 1 and is_of_update(names) and not {*names} & OF_ROLLOUTS:
            return "a CSV of logged numbers"
        if counter is None or (counter.lower() not in STEPS and not is_log_row(dict.fromkeys(names))):
            return None
        return f"a CSV with a column {counter.lower()}"

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows that have a step; where none has one, they may be numbered."""
        rows, sentences = read_once(_read, source, notes)
        yield from entries_of_rows(rows, notes)
        for sentence in sentences:
            notes.say(sentence)


def _read(source: Source, notes: LogNotes) -> tuple[Sequence[Row], Sequence[str]]:
    """Return the rows that have a step, or all if none has one, and what is said of them.

    Raises:
        InputError: if it cannot be read.
    """
    try:
        with Path(source.path).open(encoding="utf-8-sig", newline="") as file:
            _, delimiter = _head(Path(source.path))
            return _rows(csv.DictReader(_bounded(file, source.name), delimiter=delimiter), delimiter, source.name)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source.name}: not a CSV in UTF-8 ({error})") from None


def tag_of(source: str) -> str:
    """Return the metric that a file is called after which TensorBoard's page gave.

    >>> tag_of("logs/run-train-tag-train_reward.csv"), tag_of("reward.csv")
    ('train_reward', 'reward')
    """
    return PurePath(source).stem.rpartition("-tag-")[2]


def _columns(names: Sequence[str], counter: str, source: str) -> dict[str, tuple[str, str]]:
    """Return of which run, where there are several, and of which metric each column is.

    Raises:
        InputError: if two columns have one name.
    """
    twice = next((name for name, count in Counter(names).items() if name and count > 1), None)
    if twice is not None:
        raise InputError(f"{source}: two columns are called {twice}; keep one of them")
    if chart := _chart(names):
        return chart if len({run for run, _ in chart.values()}) > 1 else {name: ("", chart[name][1]) for name in chart}
    if names == DOWNLOADED:
        return {"Value": ("", tag_of(source))}
    return {name: ("", name) for name in names if name != counter}


def _rows(table: "csv.DictReader[str]", delimiter: str, source: str) -> tuple[list[Row], list[str]]:
    counter = _counter(table.fieldnames or ()) or ""
    columns = _columns(table.fieldnames or (), counter, source)
    extremes = [(name, f"{name}{end}") for name in columns for end in _EXTREMES if f"{name}{end}" not in columns]
    binned, odd, short, rows = False, list[int](), list[int](), list[Row]()
    for number, row in enumerate(table, start=2):
        short += [len(rows)] if None in row.values() else []
        cells = _given(row, delimiter)
        step = {counter if counter in STEPS else "step": cells[counter]} if counter in cells else {}
        if None in row or (step and step_of(step) is None):
            odd.append(number)
            continue
        binned |= any(cells.get(extreme, cells.get(name)) != cells.get(name) for name, extreme in extremes)
        of_runs: dict[str, dict[str, object]] = {}
        for name, (run, metric) in columns.items():
            if name in cells:
                of_runs.setdefault(run, {RUNS[0]: run} if run else {})[metric] = cells[name]
        where = f"{source}, line {number}"
        rows += [(plain({**values, **step}) if step else values, where) for values in of_runs.values() or [{}]]
    if odd and not rows:
        raise InputError(
            f"{source}, line {odd[0]}: no row has as many cells as the first line has names, and a {counter} where an "
            "integer of 0 or more was expected; export the table again"
        )
    sentences = []
    # The end of a run may write other numbers, or half a line: nothing says which column each is of.
    if len(rows) > 1 and short == [len(rows) - 1]:
        line = rows.pop()[1].rpartition(", ")[2]
        sentences.append(f"the last row has fewer cells than the first line has names, and is left out ({line})")
    if binned:
        sentences.append("points of the chart are means of several steps; export the run's history for all")
    if odd:
        count = "1 line has" if len(odd) == 1 else f"{len(odd):,} lines have"
        are = "is" if len(odd) == 1 else "are"
        sentences.append(f"{count} no whole step or too many cells, and {are} left out (line {odd[0]:,})")
    return rows, sentences


def _given(row: Mapping[str | None, object], delimiter: str) -> dict[str, object]:
    """Return the cells of a row that are not empty; where semicolons separate them, commas may separate decimals."""
    return {
        name: _cell(cell.replace(",", ".") if delimiter == ";" else cell)
        for name, cell in row.items()
        if isinstance(name, str) and isinstance(cell, str) and cell.strip()
    }


def _counter(names: Sequence[str]) -> str | None:
    """Return the column that numbers the rows.

    >>> _counter(["epoch", "Step", "loss"]), _counter(["loss", "reward"])
    ('Step', None)
    """
    of_name = {name.strip().lower(): name for name in reversed(names) if name}
    return next((of_name[name] for name in _COUNTERS if name in of_name), None)


def _bounded(file: TextIO, name: str) -> Iterator[str]:
    while line := file.readline(lines.LONGEST_LINE + 1):
        if len(line) > lines.LONGEST_LINE:
            raise InputError(f"{name}: a line is longer than {lines.LONGEST_LINE >> 20} MiB; that is no log of numbers")
        yield line


def _head(path: Path) -> tuple[list[str], str]:
    """Return the names in the first line, and what separates them: commas or semicolons."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            line = file.readline(2**20)
        delimiter = max(",;", key=line.count)
        return next(csv.reader([line], delimiter=delimiter), []), delimiter
    except (OSError, UnicodeDecodeError, csv.Error):
        return [], ","


def _chart(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The columns of a chart, each with its run and metric, but for the extremes; none if it is no chart."""
    if len(names) < 2 or names[0] not in (*STEPS, "Step") or any(" - " not in name for name in names[1:]):
        return {}
    parts = {name: name.rpartition(" - ") for name in names[1:] if not name.endswith(_EXTREMES)}
    return {name: (run, metric) for name, (run, _, metric) in parts.items()}


def _cell(text: str) -> object:
    number = int(text) if _WHOLE.fullmatch(text.strip()) else number_in(text)
    return text if number is None else number

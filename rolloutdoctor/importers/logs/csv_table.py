"""A CSV of logged numbers, one row a step: what wandb, CSVLogger and spreadsheets export."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rolloutdoctor.importers.logs.base import STEPS, Entry, LogNotes, entries_of
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.cells import decimal
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError, SeveralRunsError

OF_ROLLOUTS = {"group_id", "prompt", "completion", "response", "sample_id", "uid"}
"""Columns that no log has: with a row for each response, the last one of a step would stand for all."""
_CHART_STEPS = (*STEPS, "Step")
_EXTREMES = ("__MIN", "__MAX")
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")


class CsvTable:
    """A CSV with a column of steps, or a chart that wandb's page exported: ``Step,"RUN - METRIC",...``."""

    def detect(self, path: Path) -> str | None:
        """Look at the first line: names between commas, one of them a step's."""
        names = _first_line(path) if path.is_file() else []
        if _chart(names):
            return "a chart of wandb as CSV"
        return "a CSV with a column step" if {*names} & {*STEPS} and not {*names} & OF_ROLLOUTS else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows that have a step."""
        return _csv(source, notes)


def _csv(source: Source, notes: LogNotes) -> Iterator[Entry]:
    try:
        with Path(source.path).open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(_bounded(file, source.name))
            names = table.fieldnames or ()
            twice = next((name for name in names if name and list(names).count(name) > 1), None)
            if twice is not None:
                raise InputError(f"{source.name}: two columns are called {twice}; keep one of them")
            chart = _chart(names)
            runs = sorted({run for run, _ in chart.values()})
            if len(runs) > 1:
                raise SeveralRunsError(
                    f"{source.name}: a chart of several runs ({', '.join(runs[:3])}); export one run's"
                )
            named, without = next((name for name in _CHART_STEPS if name in names), None), 0
            binned = False
            for number, row in enumerate(table, start=2):
                given: dict[str, object] = {}
                for name, cell in row.items():
                    if isinstance(name, str) and isinstance(cell, str) and cell.strip():
                        given[name] = _cell(cell)
                if None in row:
                    raise InputError(f"{source.name}, line {number}: more cells than the first line has names")
                without += named not in given
                if named in given and chart:
                    cells = {name: given[name] for name in chart if name in given}
                    binned |= any(
                        given.get(name + end, cell) != cell for name, cell in cells.items() for end in _EXTREMES
                    )
                    values = {chart[name][1]: cell for name, cell in cells.items()}
                    step = {"step" if named == "Step" else named: given[named]}
                    yield from entries_of({**values, **step}, f"{source.name}, line {number}", notes)
                elif named in given:
                    yield from entries_of(given, f"{source.name}, line {number}", notes)
            if binned:
                notes.tell(
                    f"{source.name}: points of the chart are means of several steps; export the run's history for all"
                )
            if without:
                notes.tell(f"{source.name}: {without:,} lines without a step are left out")
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{source.name}: not a CSV in UTF-8 ({error})") from None


def _bounded(file: TextIO, name: str) -> Iterator[str]:
    while line := file.readline(lines.LONGEST_LINE + 1):
        if len(line) > lines.LONGEST_LINE:
            raise InputError(f"{name}: a line is longer than {lines.LONGEST_LINE >> 20} MiB; that is no log of numbers")
        yield line


def _first_line(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader([file.readline(2**20)]), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _chart(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """The columns of a chart, each with its run and metric, but for the extremes; none if it is no chart."""
    if len(names) < 2 or names[0] not in _CHART_STEPS or any(" - " not in name for name in names[1:]):
        return {}
    parts = {name: name.rpartition(" - ") for name in names[1:] if not name.endswith(_EXTREMES)}
    return {name: (run, metric) for name, (run, _, metric) in parts.items()}


def _cell(text: str) -> object:
    try:
        return int(text) if _WHOLE.fullmatch(text.strip()) else decimal(text)
    except ValueError:
        return text

"""Tables of logged numbers in a text: what a notebook shows, pasted, in Markdown, or in the file of the notebook."""

import re
from collections.abc import Iterable, Iterator
from html import unescape
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import Entry, LogNotes
from rolloutdoctor.importers.logs.console import beginning, lines_of
from rolloutdoctor.importers.logs.csv_table import OF_ROLLOUTS
from rolloutdoctor.importers.reading.cells import decimal
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import writers

_LOSSES = {"training loss": "loss", "validation loss": "eval_loss"}
"""How the transformers Trainer heads its columns in a notebook; Unsloth adds all other metrics, as `rewards / a`."""

_OF_A_TRAINING = ("trainer_state.json", "training_args.bin")
"""Files beside a model card, which repeats some of what is in them, rounded."""

_CELL = re.compile(r"<t([hd])\b[^>]{0,200}>([^<]{0,300})</t\1>|</tr>")
_STEP = re.compile(r"[0-9]{1,18}")
_FEWEST_NAMES, _MOST_CELLS = 2, 1_000


class TextTable:
    """A line of names, one of them ``Step``, and lines of as many numbers, between ``|``, tabs or HTML's tags.

    ``text_to_html_table`` and ``NotebookProgressCallback.on_log`` (transformers/utils/notebook.py).
    """

    def detect(self, path: Path) -> str | None:
        """Look for a table with a step and a loss, or names that trainers log."""
        if path.name == "README.md" and any((path.parent / name).exists() for name in _OF_A_TRAINING):
            return None
        found = next(_tables(beginning(path)), None)
        return None if found is None else "a table of logged numbers"

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the rows of the table with most columns: a training before it may have one of its own."""
        found = list(_tables(lines_of(source)))
        widest = max((len(names) for names, _ in found), default=0)
        chosen = [rows for names, rows in found if len(names) == widest]
        if len(found) > len(chosen):
            notes.tell(f"{source.name}: of {len(found)} tables those with {widest} columns are read")
        for row in (row for rows in chosen for row in rows):
            step = int(row.pop("step"))
            for split, prefix in ((TRAIN, ""), (EVAL, "eval_")):
                values: dict[str, float | None] = {
                    name.removeprefix("eval_"): number
                    for name, cell in row.items()
                    if name.startswith("eval_") == bool(prefix) and (number := _number(cell)) is not None
                }
                if values:
                    yield step, split, values


def _tables(lines: Iterable[str]) -> Iterator[tuple[list[str], list[dict[str, str]]]]:
    """The tables that have rows: names, and cells by name."""
    names: list[str] = []
    rows: list[dict[str, str]] = []
    for cells in _rows(lines):
        if (head := _head(cells)) is not None:
            if rows:
                yield names, rows
            names, rows = head, []
        elif names and len(cells) == len(names):
            row = dict(zip(names, cells, strict=True))
            if _STEP.fullmatch(row["step"]):
                rows.append(row)
    if rows:
        yield names, rows


def _rows(lines: Iterable[str]) -> Iterator[list[str]]:
    cells: list[str] = []
    for line in lines:
        if "<t" in line or "</tr>" in line:
            for match in _CELL.finditer(line):
                if match[1]:
                    cells.append(unescape(match[2]).strip())
                if not match[1] or len(cells) > _MOST_CELLS:
                    yield cells
                    cells = []
        elif "|" in line or "\t" in line:
            text = line.strip().strip("|")
            yield [cell.strip() for cell in text.split("|" if "|" in text else "\t")]


def _head(cells: list[str]) -> list[str] | None:
    """The names of metrics in the first line of a table; None if it is no such line."""
    lower = [cell.lower() for cell in cells]
    if lower.count("step") != 1 or not _FEWEST_NAMES <= len(cells) <= _MOST_CELLS or len({*lower}) < len(lower):
        return None
    names = [
        low if low == "step" else _LOSSES.get(low, cell.replace(" / ", "/"))
        for cell, low in zip(cells, lower, strict=True)
    ]
    return names if ("loss" in names or writers(names)) and not {*names} & OF_ROLLOUTS else None


def _number(cell: str) -> float | None:
    """The number in a cell; None where there is none, as in `No Log`."""
    try:
        return decimal(cell)
    except ValueError:
        return None

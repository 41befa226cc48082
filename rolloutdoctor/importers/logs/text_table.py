"""Tables of logged numbers in a text: what a notebook shows, pasted or in Markdown."""

import re
from collections.abc import Iterable, Iterator
from html import unescape

from rolloutdoctor.importers.logs.numbers import number, of_splits
from rolloutdoctor.importers.logs.printed import Form, Printed, name_of, values_of
from rolloutdoctor.importers.logs.rows import OF_ROLLOUTS, STEPS
from rolloutdoctor.metric_names.generic import generic
from rolloutdoctor.metric_names.table import metric_quantities, writers

_LOSSES = {"training loss": "loss", "validation loss": "eval_loss"}
"""How the transformers Trainer heads its columns in a notebook; Unsloth adds all other metrics, as `rewards / a`."""

_EMPTY = {"", "-", "–", "—", "n/a", "none", "null", "no log"}
"""Cells, in lower case, of a step at which the metric was not logged."""

_CELL = re.compile(r"<t([hd])\b[^>]{0,200}>([^<]{0,300})</t\1>|</tr>")
_BAR = re.compile(r"\[ {0,18}[0-9]{1,18}/([0-9]{1,18}) [^\]]{1,60}, Epoch [0-9.]{1,9}/[0-9]{1,9}\]")
_GAP = re.compile(r"\s{2,}")
_COMMA = re.compile(r"\s*,\s*")
_STEP = re.compile(r"(?:[Ss]teps? )?(?:[0-9]{1,18}[-–])?([0-9]{1,18})")
"""A step, or a range of which a row has the means: it is of the last one."""
_STEPS = (*(name for name in STEPS if name.isidentifier()), "episode")
"""Heads of the column that numbers the rows, the best first, in lower case."""

_BARS = str.maketrans("│┃║", "|||")
_TIGHT = re.compile(rf"\s*(?:[0-9]+[\s,]+[-+0-9.]|(?i:(?:{'|'.join(_STEPS)})[\s,]+[a-z]))")
"""A line of a table with one space or comma between its cells, or the line of its names."""
_FEWEST_NAMES, _MOST_CELLS = 2, 1_000


class TextTable(Form):
    """A line of names, one of them ``Step``, and lines of as many numbers, between ``|``, tabs, spaces or HTML's tags.

    ``text_to_html_table`` and ``NotebookProgressCallback.on_log`` (transformers/utils/notebook.py).
    """

    title = "a table of logged numbers"

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the rows of all tables with a step and a loss, or names that trainers log."""
        names: list[str] = []
        width = first = 0
        ends: list[int] = []
        is_tagged = False
        for each, tagged in _rows(_with_ends(lines, ends)):
            cells = _without_ends(each)
            if (head := _head(cells)) is not None:
                names, width, first, is_tagged = head, len(each), each.index(cells[0]), tagged
                continue
            if is_tagged and not tagged:
                # Below a table in HTML, numbers of a text are none of its rows.
                continue
            if len(each) == width:
                cells = each[first : first + len(names)]
            if names and len(names) <= len(cells) <= len(names) + 1:
                row = dict(zip(names, cells[-len(names) :], strict=True))
                step = _STEP.fullmatch(row.pop("step"))
                if step is None:
                    continue
                for split, split_cells in of_splits(row, "eval_"):
                    values = values_of(split_cells)
                    odd = {name: cell for name, cell in split_cells.items() if name not in values}
                    if values:
                        texts = {name: cell for name, cell in odd.items() if cell.lower() not in _EMPTY}
                        yield Printed(values, int(step[1]), split, texts=texts, total_steps=ends[-1] if ends else None)


def _with_ends(lines: Iterable[str], ends: list[int]) -> Iterator[str]:
    """Yield lines, and keep the steps that the bar above a table of a notebook ends with."""
    for line in lines:
        if "Epoch" in line and (bar := _BAR.search(line)) is not None:
            ends.append(int(bar[1]))
        yield line


def _rows(lines: Iterable[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield the cells of each row, and whether they stand between tags."""
    cells: list[str] = []
    for line in lines:
        if not line.isascii():
            line = line.translate(_BARS)
        if "<t" in line or "</tr>" in line:
            for match in _CELL.finditer(line):
                if match[1]:
                    cells.append(unescape(match[2]).strip())
                if not match[1] or len(cells) > _MOST_CELLS:
                    yield cells, True
                    cells = []
        elif "|" in line or "\t" in line:
            yield [cell.strip() for cell in line.strip(" \r\n").split("|" if "|" in line else "\t")], False
        elif "  " in line:
            # As pandas prints a table, maybe with the number of each row before it; names may have a space within.
            gaps, words = _GAP.split(line.strip()), line.split()
            is_split = _head(words) is not None or all(number(word) is not None for word in words)
            yield (words if _head(gaps) is None and is_split else gaps), False
        elif _TIGHT.match(line):
            words = _COMMA.split(line.strip()) if "," in line else line.split()
            # Nothing but blanks is between the words of a sentence, too: ``5100 - 1500 = 3600 centimeters``.
            if _head(words) is not None or all(number(word) is not None or word.lower() in _EMPTY for word in words):
                yield words, False


def _without_ends(cells: list[str]) -> list[str]:
    """Return the cells of a line between its outer separators; those of a table's rows may be empty at an end."""
    filled = [place for place, cell in enumerate(cells) if cell]
    return cells[filled[0] : filled[-1] + 1] if filled else []


def _named(cell: str) -> str:
    """Return the metric that a head names: ``rewards / a`` of a trainer, or words."""
    cell = cell.replace(" / ", "/")
    return name_of(cell) if " " in cell else cell


def _head(cells: list[str]) -> list[str] | None:
    """The names of metrics in the first line of a table; None if it is no such line."""
    if not _FEWEST_NAMES <= len(cells) <= _MOST_CELLS:
        return None
    lower = [cell.lower() for cell in cells]
    counter = next((name for name in _STEPS if name in lower), None)
    if counter is None or len({*lower}) < len(lower):
        return None
    names = [
        "step" if low == counter else _LOSSES.get(low) or _named(cell) for cell, low in zip(cells, lower, strict=True)
    ]
    if len({*names}) < len(names):
        return None
    is_log = any(map(generic, names)) or bool(writers(names))
    taken = {*metric_quantities(names).values()}
    if "accuracy" in taken and "reward" not in taken:
        # Of a classifier, whose evaluation has both: the name says that its loss is of held-out data.
        names = ["val_loss" if name == "eval_loss" else name for name in names]
    return names if is_log and not {*lower} & OF_ROLLOUTS else None

"""The cells of a Jupyter notebook: what its code printed and showed, and the code itself, of which nothing is run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.text_lines import lines_in

_LARGEST = 256 * 2**20
_LOOKED_AT = 2**16

_ROW = re.compile(r"<tr><td>([^<>]{1,200})</td><td>([^<>]{1,100})</td></tr>")


@dataclass(frozen=True)
class Notebook:
    """A notebook.

    Attributes:
        code: the source of each cell of code, in order.
        outputs: the lines that each of them printed or showed.
    """

    code: tuple[str, ...]
    outputs: tuple[tuple[str, ...], ...]


def is_notebook(path: Path) -> bool:
    """Tell a notebook by its keys, or by its name."""
    try:
        with path.open("rb") as file:
            start = file.read(_LOOKED_AT).lstrip()
    except OSError:
        return False
    return start.startswith(b"{") and (path.suffix == ".ipynb" or (b'"cells"' in start and b'"cell_type"' in start))


def read_notebook(path: Path) -> Notebook | None:
    """Read a notebook, whatever it is called; None if it is none, or not whole."""
    if not path.is_file() or not is_notebook(path) or path.stat().st_size > _LARGEST:
        return None
    body = lines.document(path.read_bytes())
    sheets = body.get("worksheets") if isinstance(body, dict) else None
    # Before version 4 of the format cells are in sheets.
    holder = sheets[0] if isinstance(sheets, list) and sheets else body
    cells = holder.get("cells") if isinstance(holder, dict) else None
    if not isinstance(cells, list):
        return None
    code = [cell for cell in cells if isinstance(cell, dict) and cell.get("cell_type") == "code"]
    return Notebook(
        tuple(_text(cell.get("source", cell.get("input"))) for cell in code),
        tuple(tuple(_shown(cell.get("outputs"))) for cell in code),
    )


def _shown(outputs: object) -> Iterator[str]:
    for output in outputs if isinstance(outputs, list) else []:
        if not isinstance(output, dict):
            continue
        data = output.get("data")
        shown = data if isinstance(data, dict) else output
        html = _text(shown.get("text/html", shown.get("html")))
        text = _text(shown.get("text/plain")) or _text(output.get("text"))
        shown_text = _summary(html) or html if "<t" in html else text
        yield from lines_in(shown_text.encode("utf-8", "replace"))


def _summary(html: str) -> str:
    """Return the summary of a run that wandb shows as a table, as it prints it to a console; none without one."""
    _, head, table = html.partition("Run summary:")
    rows = _ROW.findall(table) if head and 'class="wandb"' in html else []
    return (
        "\n".join(["wandb: Run summary:", *(f"wandb: {unescape(name)} {value}" for name, value in rows)])
        if rows
        else ""
    )


def _text(value: object) -> str:
    """Return a text, which a notebook keeps whole or as a list of lines."""
    if isinstance(value, list):
        return "".join(part for part in value if isinstance(part, str))
    return value if isinstance(value, str) else ""

"""The notebook of the documentation runs, and shows what its cells give; ``UPDATE=1 pytest`` writes that anew.

Pictures are drawn and not kept. A kernel shows the same as the classes say that they are shown as.
"""

import ast
import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"
FORMS = {"text/html": "_repr_html_", "image/png": "_repr_png_"}
ROUNDING = re.compile(r"\d(?:\.\d+)?e-\d\d|(?<=worst)[\d.]+|(?<=error)[\d.]+(?=oftherounding)")
"""Numbers that are rounding of float32, which is another one on another processor; in a text without spaces."""
LARGEST = 16_000
"""Characters that one cell may show."""


def run_cell(source, names):
    """Run a cell, and return the value of its last line if that is an expression."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), NOTEBOOK.name, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
    exec(compile(ast.Module([last], []), NOTEBOOK.name, "exec"), names)
    return None


def run_and_show(source, names, number):
    """What a notebook keeps of a cell: what it prints, and its value."""
    with redirect_stdout(io.StringIO()) as printed:
        value = run_cell(source, names)
    text = printed.getvalue().splitlines(keepends=True)
    stream = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    return stream + shown(value, number)


def shown(value, number):
    """What a notebook keeps of a value: text, and HTML where the value has it; a picture is drawn, and left out."""
    if value is None:
        return []
    forms = {kind: getattr(value, name)() for kind, name in FORMS.items() if hasattr(value, name)}
    if "image/png" in forms:
        assert forms["image/png"].startswith(b"\x89PNG")
        return []
    forms |= {"text/plain": repr(value)}
    data = {kind: text.splitlines(keepends=True) for kind, text in sorted(forms.items())}
    assert sum(map(len, forms.values())) < LARGEST
    return [{"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}]


def without_rounding(shown):
    """What is shown, without what is rounding; lines of a list are one text, for a line may be broken in a sentence."""
    if isinstance(shown, dict):
        return {name: without_rounding(value) for name, value in shown.items()}
    if isinstance(shown, list) and not all(isinstance(each, str) for each in shown):
        return [without_rounding(each) for each in shown]
    text = "".join(shown) if isinstance(shown, list) else str(shown)
    return ROUNDING.sub("~", "".join(text.split()))


@pytest.mark.slow
def test_every_cell_runs_and_shows_what_is_kept(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    book, names = json.loads(NOTEBOOK.read_text(encoding="utf-8")), {}
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    found = [run_and_show("".join(cell["source"]), names, number) for number, cell in enumerate(cells, 1)]
    if os.environ.get("UPDATE"):
        for number, (cell, outputs) in enumerate(zip(cells, found, strict=True), 1):
            cell |= {"execution_count": number, "outputs": outputs}
        NOTEBOOK.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    kept = [cell["outputs"] for cell in cells]
    assert without_rounding(kept) == without_rounding(found)
    assert "<table>" in "".join(found[2][0]["data"]["text/html"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_kernel_shows_each_result_once_and_nothing_else():
    """Libraries that print by themselves in a notebook would leave loose outputs, and an empty result."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.read(NOTEBOOK, as_version=4)
    kept = [[dict(one) for one in cell.outputs] for cell in book.cells if cell.cell_type == "code"]
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=place).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    for cell, known in zip(cells, kept, strict=True):
        found = [one for one in cell.outputs if "image/png" not in one.get("data", {})]
        assert [one.output_type for one in found] == [one["output_type"] for one in known], cell.source
        for one, same in zip(found, known, strict=True):
            forms = ("text/html",) if "text/html" in one.get("data", {}) else ("text/plain",)
            of_kernel, of_class = (
                "".join(each["text"]) if "text" in each else "".join(each["data"][form])
                for form in forms
                for each in (one, same)
            )
            # A kernel breaks the lines of lists and tuples its own way.
            assert ROUNDING.sub("~", "".join(of_kernel.split())) == ROUNDING.sub("~", "".join(of_class.split()))
    pictures = [cell for cell in cells if any("image/png" in one.get("data", {}) for one in cell.outputs)]
    assert len(pictures) == 2

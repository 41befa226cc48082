"""README and docs are true: tables are what the code says, outputs what the commands print, links lead somewhere.

``UPDATE=1 pytest tests/test_readme.py`` rewrites the tables and the outputs.
"""

import os
import re
import shlex
from pathlib import Path

import pytest
import support
from fuzz.harness import run
from measured import measured
from proof.table import claimed, markdown

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = 150
"""Lines of the README at most."""
WORDS = 610
"""Its words at most, outside of tables: a new trainer is a line of one."""
COLUMNS_SHOWN = 80
"""Columns of outputs."""


def columns_table() -> str:
    rows = ["| column | type | meaning | also read as |", "| --- | --- | --- | --- |"]
    for column in COLUMNS:
        aliases = ", ".join(f"`{name}`" for name in column.aliases)
        rows.append(f"| `{column.name}` | {column.kind.value} | {column.meaning} | {aliases} |")
    return "\n".join(rows)


def row_table() -> str:
    rows = ["| column | type | unit | meaning | from |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| `{one.name}` | {one.dtype} | {one.unit} | {one.meaning} | {one.source} |" for one in ROW_COLUMNS.values()
    ]
    return "\n".join(rows)


def parity_table() -> str:
    return markdown(claimed())


@pytest.mark.parametrize(
    ("name", "page", "table_of"),
    [
        ("columns", "columns", columns_table),
        ("rows", "python", row_table),
        ("parity", "../tests/proof/results", parity_table),
        ("measured", "how-we-know", measured),
        pytest.param("support", "../README", support.short, marks=pytest.mark.slow),
    ],
    ids=["columns", "rows", "parity", "measured", "support in short"],
)
def test_table_is_what_the_code_says(name, page, table_of):
    path = ROOT / "docs" / f"{page}.md"
    table, text = table_of(), path.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    pattern = re.compile(re.escape(begin) + "(.*?)" + re.escape(end), re.DOTALL)
    if os.environ.get("UPDATE"):
        text = pattern.sub(lambda _: f"{begin}{table}\n{end}", text)
        path.write_text(text, encoding="utf-8")
    found = pattern.search(text)
    assert found is not None
    assert found[1].strip() == table


def outputs():
    """Command lines after a dollar sign, each with the lines that a page shows of what it prints."""
    for page in PAGES:
        for block in re.findall(r"^```\n(\$ .*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            line, _, shown = block.partition("\n")
            yield page, line, shown


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line", "shown"), [pytest.param(*one, id=one[1][2:]) for one in outputs()])
def test_output_is_what_the_command_prints(page, line, shown):
    _, printed, _, _ = run([*shlex.split(line)[2:], "--device", "cpu"], ROOT, COLUMNS_SHOWN)
    first, is_cut, _ = shown.partition("...\n")
    count = len(first.splitlines())
    expected = "".join(printed.splitlines(keepends=True)[:count]) if is_cut else printed
    if os.environ.get("UPDATE"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(first, expected), encoding="utf-8")
        first = expected
    assert first == expected


def test_the_parts_of_a_report_that_are_explained_are_in_the_one_shown():
    (shown,) = (shown for page, _, shown in outputs() if page.name == "report.md")
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8").partition("## Verdicts")[0]
    parts = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    assert len(parts) > 8
    assert [part for part in parts if part not in shown] == []


def test_the_readme_is_short():
    text = PAGES[0].read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= LINES
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= WORDS


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE)) == {
        page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]
    }

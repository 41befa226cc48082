"""No page, message or script names a command that is hidden; the changelog says which names went."""

import re
from pathlib import Path

import pytest

from rolloutdoctor import packs

ROOT = Path(__file__).parent.parent
HIDDEN = sorted({*packs.RENAMED, *packs.COMMANDS} - {name for names in packs.COMMAND_GROUPS.values() for name in names})
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile", "action.yml", "mkdocs.yml")),
    *sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".ipynb", ".py")),
    *sorted((ROOT / "sample_data").glob("*.py")),
    *sorted(path for path in (ROOT / "rolloutdoctor").rglob("*") if path.suffix in (".py", ".html", ".js")),
]
OWN = {"rolloutdoctor/commands/merge/cli.py"}
"""Modules of the hidden commands themselves."""

CALLED = re.compile(rf"rolloutdoctor[\s`]+({'|'.join(HIDDEN)})(?![\w.-])(?!\s+of\b)")
SPAN = re.compile(r"`(merge|measure|recompute|convert|causes|trainers)(?: [A-Z-][^`]*)?`")
"""How a page calls a command without the name of the program; the others are names of tables or columns, too."""


def test_what_is_hidden_is_known():
    known = ["causes", "convert", "fixes", "measure", "merge", "metrics", "recompute", "rule", "schema", "trainers"]
    assert known == HIDDEN


def called(path):
    """The calls of hidden commands on a page."""
    text = path.read_text(encoding="utf-8")
    found = [one[0] for one in CALLED.finditer(text)]
    if path.suffix == ".md":
        # The cells of tables are values of options and names of columns.
        prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
        found += [one[0] for one in SPAN.finditer(prose)]
    return found


def test_no_page_names_a_hidden_command():
    pages = {str(path.relative_to(ROOT)): path for path in PAGES}
    assert pages.keys() >= OWN
    assert {name: found for name, path in pages.items() if name not in OWN and (found := called(path))} == {}


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("`rolloutdoctor recompute run.parquet`", True),
        ("`rolloutdoctor\nmetrics TRAINER` lists them", True),
        ("see rolloutdoctor rule RDA001", True),
        ("`rolloutdoctor explain metrics`", False),
        ("the rolloutdoctor rule of thumb", False),
        ("from rolloutdoctor.metrics import x", False),
    ],
)
def test_a_name_is_seen_where_it_is_a_command(text, is_found):
    assert bool(CALLED.search(text)) == is_found


def test_the_changelog_says_what_went():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Fewer names")[2].partition("\n### ")[0]
    assert all(f"`{name}`" in text for name in HIDDEN)

"""The hook of the docs makes a page of every rule, and links where pages name one."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rolloutdoctor.metric_names.quantities import QUANTITIES
from rolloutdoctor.results.rule_pages import SITE
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import FIXES
from rolloutdoctor.search.hypotheses.table import FIX_CODE, HYPOTHESES
from rolloutdoctor.trainers.table import TRAINERS

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def hooks():
    sys.path.insert(0, str(ROOT / "docs"))  # as mkdocs does
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_every_rule_is_its_docstring(hooks):
    for rule in RULES:
        page = hooks.page_of(rule.code)
        assert page.startswith(f"# {rule.code} {rule.name}\n")
        assert rule.title() in page
        assert page.count("```") % 2 == 0
        assert (">>>" in page) == ("```pycon" in page)
        assert all(f"<{address}>" in page for address in rule.references)


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("see `RDA001`.", "symptoms.md", "see [`RDA001`](rules/RDA001.md)."),
        ("see `RDA001`.", "rules/RDA002.md", "see [`RDA001`](../rules/RDA001.md)."),
        ("see `RDA001`.", "rules/RDA001.md", "see `RDA001`."),
        ("# `RDA001`", "symptoms.md", "# `RDA001`"),
        ("see [`RDA001`](x.md)", "symptoms.md", "see [`RDA001`](x.md)"),
        ("```\n`RDA001`\n```\n`RDA001`", "a.md", "```\n`RDA001`\n```\n[`RDA001`](rules/RDA001.md)"),
        ("of your own: `RDX999`", "a.md", "of your own: `RDX999`"),
    ],
)
def test_codes_are_links(hooks, text, at, expected):
    assert hooks.linked(text, at) == expected


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("causes", [one.name for one in HYPOTHESES if one.code != FIX_CODE]),
        ("fixes", FIXES),
        ("metrics", [one.name for one in QUANTITIES]),
        pytest.param("support", TRAINERS, marks=pytest.mark.slow),
    ],
)
def test_the_site_has_the_long_tables(hooks, name, entries):
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page.count(f"<!-- {name} -->") == 1
    table = hooks.with_tables(page).removeprefix(page.partition("<!--")[0])
    assert table.startswith("| ")
    assert [entry for entry in entries if f"| `{entry}` |" not in table] == []


def test_every_long_table_has_a_page(hooks):
    assert all(
        f"<!-- {name} -->" in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in hooks.TABLES
    )


def test_findings_link_the_site_that_the_docs_are_built_for():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    assert next((line.removeprefix("site_url: ") for line in menu if line.startswith("site_url: ")), "") == SITE

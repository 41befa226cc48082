"""The hook of the docs makes a page of every rule, and links where pages name one."""

import importlib.util
import sys
from pathlib import Path

import pytest

from rolloutdoctor.commands.explain.terms import TERMS
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


def pages_with(name):
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    return [page for page in pages if f"<!-- {name} -->" in page]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("causes", [one.name for one in HYPOTHESES if one.code != FIX_CODE]),
        ("fixes", FIXES),
        ("rules", [rule.code for rule in RULES]),
        ("glossary", TERMS),
        ("metrics", [one.name for one in QUANTITIES]),
        pytest.param("support", TRAINERS, marks=pytest.mark.slow),
    ],
)
def test_the_site_has_the_long_tables(hooks, name, entries):
    [page] = pages_with(name)
    assert page.count(f"<!-- {name} -->") == 1
    table = hooks.with_tables(f"<!-- {name} -->")
    assert table in hooks.with_tables(page)
    assert table.startswith("| ")
    assert [entry for entry in entries if f"| {entry} |" not in table.replace("`", "")] == []


def test_every_long_table_has_a_page(hooks):
    assert all(len(pages_with(name)) == 1 for name in hooks.TABLES if name != "trainer")


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "trainers").glob("*.md")), ids=lambda path: path.stem)
def test_the_page_of_a_trainer_follows_the_template(hooks, path):
    sections = sys.modules["trainer_pages"].SECTIONS
    page = path.read_text(encoding="utf-8")
    found = [line for line in page.splitlines() if line.startswith("## ")]
    assert found == [each for each in sections if each in found]
    assert {*sections[:3]} <= {*found}
    assert page.partition("\n## ")[0].count("```") >= 2
    assert page.rstrip().endswith(" -->")
    made = hooks.with_tables(page)
    assert f"## `{path.stem}` in short" in made
    trainer = TRAINERS[path.stem]
    assert all(str(code) in made for code in trainer.read_code)
    options = {option.name for option in trainer.options if not option.until}
    absent = {name for name in options if f"| `{name}` |" not in made}
    assert not absent, f"{absent}: no release up to {trainer.newest} has them"
    assert all(f"| {names} | " in made.replace("\\", "") for names in trainer.log.not_recomputed)


def test_every_trainer_has_a_page(hooks):
    written = hooks.written()
    made = sys.modules["trainer_pages"].pages_without_text(written)
    assert "roll" in made
    absent = {*TRAINERS} - {*written}
    assert not absent, f"{absent}: docs/trainers/NAME.md each, see docs/contribute/trainer.md"
    assert {*TRAINERS} >= {*written}
    assert "metric names" in hooks.with_tables("<!-- trainer roll -->")


def test_old_addresses_lead_to_pages(hooks, tmp_path):
    (tmp_path / "verify").mkdir()
    hooks.on_post_build(type("Config", (), {"site_dir": str(tmp_path)}))
    for old, new in hooks.MOVED.items():
        assert not (ROOT / "docs" / f"{old}.md").exists()
        assert (ROOT / "docs" / f"{new}.md").exists()
        assert f"url={'../' * (old.count('/') + 1)}{new}/" in (tmp_path / old / "index.html").read_text(
            encoding="utf-8"
        )


def test_findings_link_the_site_that_the_docs_are_built_for():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").splitlines()
    assert next((line.removeprefix("site_url: ") for line in menu if line.startswith("site_url: ")), "") == SITE

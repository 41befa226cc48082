"""Hook of mkdocs: pages of rules and trainers out of their tables, links to rules, long tables, redirects.

These are made when the site is built: as files the pages would repeat docstrings and tables.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made import TABLES
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from trainer_pages import pages_without_text

from rolloutdoctor.commands.explain import rules
from rolloutdoctor.rules.table import FAMILIES, RULES

INDEX = "Rules, causes, fixes, metrics, terms"
"""Entry of the menu that gets the pages, by family."""


_PLACE = re.compile(r"^<!-- (\w+)(?: ([\w-]+))? -->$", re.MULTILINE)


def written() -> dict[str, str]:
    """Return the trainers that have a written page, each with its page: one page may be about two."""
    pages = sorted((Path(__file__).parent / "trainers").glob("*.md"))
    return {name: page.stem for page in pages for _, name in _PLACE.findall(page.read_text(encoding="utf-8"))}


_KNOWN = ["exact", "power", "labelled", "prevalence", "dynamics", "drift", "gradients"]
MOVED = {
    **{name: f"trainers/{page}" for name, page in written().items()},
    **{f"trainers/{name}": f"trainers/{page}" for name, page in written().items() if name != page},
    **dict.fromkeys(_KNOWN, "how-we-know"),
    "verl-slime": "trainers/verl",
    "own-loop": "columns",
    "follow": "large-runs",
    "scale": "large-runs",
    "tables": "python",
    "identify": "verify",
    "architecture": "contribute/architecture",
    "causes": "rules",
    "fixes": "rules",
    "glossary": "rules",
    "metrics": "rules",
    "ci": "SKILL",
    "dumps": "support",
    "why": "compare",
    "story": "contribute/story",
}
"""Addresses of pages that moved, and the pages where their text is now."""

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!\[)`(RD[A-Z]\d{3})`(?!\])")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def page_of(code: str) -> str:
    """Return the page of a rule as Markdown."""
    found: Any = rules.body(code)
    parts = [found["page"], "## Measures\n" + ", ".join(f"`{name}`" for name in found["measures"])]
    if found["fix"]:
        parts.append(f"## Fix\n`{found['fix'].partition(':')[0]}` (see [fixes](../rules.md#fixes))")
    parts.append("## References\n" + "\n".join(f"- <{address}>" for address in found["references"]))
    body = _DOCTEST.sub(lambda example: f"```pycon\n{example[0]}\n```", "\n\n".join(parts))
    body = re.sub(r"^(## .*)\n+", r"\1\n\n", body, flags=re.MULTILINE)
    return f"# {found['code']} {found['name']}\n\n{body}\n"


def linked(text: str, at: str) -> str:
    """Return a page with every code of a rule as a link to its page, but in headings, code and its own page."""
    up = "../" * at.count("/")
    known = {rule.code for rule in RULES} - {at.removeprefix("rules/").removesuffix(".md")}

    def link(found: re.Match[str]) -> str:
        return f"[{found[0]}]({up}rules/{found[1]}.md)" if found[1] in known else found[0]

    def parts() -> Iterator[str]:
        start = 0
        for fence in _FENCE.finditer(text):
            yield prose(text[start : fence.start()])
            yield fence[0]
            start = fence.end()
        yield prose(text[start:])

    def prose(part: str) -> str:
        lines = part.split("\n")
        return "\n".join(one if one.startswith(("#", "    ")) else _CODE.sub(link, one) for one in lines)

    return "".join(parts())


def with_tables(text: str) -> str:
    """Return a page with the tables that it has places for."""
    return _PLACE.sub(lambda place: TABLES[place[1]](*filter(None, [place[2]])), text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter the pages in the menu, those of rules below the table of all rules."""
    for section in config.nav or ():
        title, entries = next(iter(section.items()))
        if title == "Trainers":
            entries += [{name: f"trainers/{name}.md"} for name in pages_without_text(written())]
        if isinstance(entries, list) and {INDEX: "rules.md"} in entries:
            entries[:] = [one for entry in entries for one in ((entry,) if entry != {INDEX: "rules.md"} else _rules())]
    return config


def _rules() -> Iterator[dict[str, object]]:
    yield {INDEX: "rules.md"}
    for start, words in FAMILIES.items():
        here = [rule for rule in RULES if rule.code.startswith(start)]
        yield {f"{start}: {words}": [{f"{one.code} {one.name}": f"rules/{one.code}.md"} for one in here]}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for rule in RULES:
        files.append(File.generated(config, f"rules/{rule.code}.md", content=page_of(rule.code)))
    for name in pages_without_text(written()):
        text = f"# {name}\n\n    rolloutdoctor check LOG\n\n<!-- trainer {name} -->\n"
        files.append(File.generated(config, f"trainers/{name}.md", content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Write a page at each old address that leads to the new one."""
    for old, new in MOVED.items():
        folder = Path(config.site_dir) / old
        folder.mkdir(exist_ok=True, parents=True)
        to = f"{'../' * (old.count('/') + 1)}{new}/"
        text = f'<!doctype html><meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{to}</a>\n'
        (folder / "index.html").write_text(text, encoding="utf-8")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables in their places, and link the rules that a page names."""
    return linked(with_tables(markdown), page.file.src_uri)

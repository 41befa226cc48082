"""What the pages of trainers take from the tables of each: releases, dumps, columns, fixes, metrics, options."""

import re
from collections.abc import Iterable, Iterator, Sequence

from rolloutdoctor.commands.explain.layout import word
from rolloutdoctor.commands.explain.trainers import dumps, lines, meaning
from rolloutdoctor.metric_names.table import SAME
from rolloutdoctor.metric_names.table import TRAINERS as LOGGED
from rolloutdoctor.search.hypotheses.fixes import FIXES
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

SECTIONS = (
    "## Record",
    "## Dump and log",
    "## What is computed",
    "## Its own faults",
    "## Releases",
)
"""Headings of the written part of a page, in this order; the first three are in every page."""

_MARKUP = re.compile(r"[*_]")


def trainer_part(name: str) -> str:
    """Return what the tables say of a trainer, as Markdown; of one whose log alone is read, what is read."""
    names = len(LOGGED.get(SAME.get(name, name), ()))
    facts = [("its log", f"{names} [metric names](../rules.md#metric-names) are understood")]
    facts += [("its dump", f"{one.summary} (`--from {one.name}`)") for one in dumps(name)]
    if name not in TRAINERS:
        facts += [("recording", "`rolloutdoctor.recorders.own_loop` ([your own loop](../columns.md#your-own-loop))")]
        return "\n".join([f"## `{name}` in short", "", *_table(("", ""), facts)])
    trainer = TRAINERS[name]
    read = [("releases read", ", ".join(map(str, trainer.read_code)))]
    read += [(f"`{option}` read", ", ".join(map(str, codes))) for option, codes in trainer.further.items()]
    found = [f"## `{name}` in short", "", *_table(("", ""), [*read, *facts])]
    for title, head, rows in (
        ("Columns that need an option or a line", ("column", "how"), list(_columns(trainer))),
        ("Fixes that concern it", ("fix", "rule", "releases and options"), list(_fixes(trainer))),
        ("Metrics that are not recomputed", ("metric", "why"), list(trainer.log.not_recomputed.items())),
        ("Options", ("option", "default", "meaning"), list(_options(trainer))),
    ):
        if rows:
            found += ["", f"### {title} (`{name}`)", "", *_table(head, rows)]
    return "\n".join(found)


def pages_without_text(written: Iterable[str]) -> list[str]:
    """Return the trainers that no written page is about: their pages are made of the tables alone."""
    return [name for name in lines() if name not in {*written}]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = (" | ".join(map(_cell, row)) for row in rows)
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *(f"| {row} |" for row in cells)]


def _cell(text: str) -> str:
    """Return a text of which only the links, and what is between backticks, are markup."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if place % 2 else _MARKUP.sub(r"\\\g<0>", part) for place, part in enumerate(parts))


def _columns(trainer: Trainer) -> Iterator[tuple[str, str]]:
    common = trainer.recording.get("*", "")
    for column, words in trainer.recording.items():
        if column != "*":
            yield f"`{column}`", words.removeprefix(common).lstrip(",; ")


def _fixes(trainer: Trainer) -> Iterator[tuple[str, str, str]]:
    for fix in FIXES.values():
        if trainer.name in fix.trainers():
            yield f"`{fix.name}`: {fix.summary}", f"`{fix.code}`", fix.releases.get(trainer.name, "")


def _options(trainer: Trainer) -> Iterator[tuple[str, str, str]]:
    newest = parse_version(trainer.newest)
    for option in trainer.options:
        if option.exists_at(newest):
            yield f"`{option.name}`", f"`{word(option.default_at(newest))}`", meaning(option)

"""The page: one file that needs no network and no script, for people who want to read everything about a run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from rolloutdoctor.results.figures import Gallery, GradientData, KlData, RatioData
from rolloutdoctor.results.findings import NotApplicable, Report, Setting, Skipped
from rolloutdoctor.results.row_views import RowView
from rolloutdoctor.views.audit_words import audit_line, audit_lines
from rolloutdoctor.views.concise import counts
from rolloutdoctor.views.layout import made_by
from rolloutdoctor.views.links import picture_of
from rolloutdoctor.views.step_tables import cell, step_table
from rolloutdoctor.views.style import plain, shown, value_of, where
from rolloutdoctor.views.token_strip import long_text, strip
from rolloutdoctor.views.verdict import verdict
from rolloutdoctor.views.viewer_page import policy

LONG = 2000
"""Characters of one text of the page."""


@dataclass(frozen=True)
class Drawing:
    """A picture in the page.

    Attributes:
        kind: its name.
        title: what it says.
        note: what its numbers are, or why there is nothing to be seen.
        svg: an SVG element, trusted; None if there is nothing to be seen.
    """

    kind: str
    title: str
    note: str
    svg: str | None


@dataclass(frozen=True)
class Page:
    """Everything that is on the page.

    Attributes:
        name: of the run.
        report: what the rules found.
        drawings: the pictures.
        gallery: what the pictures are made of, and why others are missing.
        definitions: code of a rule to its page.
        lead: kind of the picture that is at the top, or None.
        rows: the worst rows.
        viewer: groups to be looked at, a document of its own, escaped; or None.
    """

    name: str
    report: Report
    drawings: Sequence[Drawing]
    gallery: Gallery
    definitions: Mapping[str, str]
    lead: str | None = None
    rows: Sequence[RowView] = ()
    viewer: Markup | None = None


def render(page: Page) -> str:
    """Render the page."""
    templates = Environment(
        loader=PackageLoader("rolloutdoctor.views"),
        autoescape=True,
        finalize=_plain,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "audit_line": audit_line,
        "audit_lines": audit_lines,
        "page": _page,
        "by_reason": _by_reason,
        "made_by": made_by,
        "cell": cell,
        "counts": counts,
        "long_text": long_text,
        "picture_of": picture_of,
        "plain": _plain,
        "prose": _prose,
        "shown": shown,
        "step_table": step_table,
        "strip": strip,
        "thousands": "{:,}".format,
        "value_of": value_of,
        "verdict": verdict,
        "where": where,
    }
    drawn = [drawing.kind for drawing in page.drawings if drawing.svg is not None]
    return templates.get_template("page.html").render(
        page=page,
        policy=policy(with_viewer=page.viewer is not None),
        drawn=drawn,
        lead=next(
            (drawing for drawing in page.drawings if drawing.kind == page.lead and drawing.svg is not None), None
        ),
        tables={finding.code: step_table(finding.per_step) for finding in page.report.findings},
        steps=_steps(page.gallery),
        chosen=_options(page.report.config),
    )


def _options(config: Mapping[str, Setting]) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """The options that somebody gave or that were assumed, and those that are the trainer's defaults."""
    default = {name: setting for name, setting in config.items() if not setting.is_stated and not setting.assumed}
    return {name: setting for name, setting in config.items() if name not in default}, default


def _by_reason(rules: Iterable[Skipped | NotApplicable]) -> list[tuple[list[Skipped | NotApplicable], str, str]]:
    """The rules that could not be tested, those with one reason and one remedy together: the most first."""

    def why(rule: Skipped | NotApplicable) -> tuple[str, str]:
        return rule.reason, rule.remedy if isinstance(rule, Skipped) else ""

    groups = [(list(group), *key) for key, group in groupby(sorted(rules, key=why), key=why)]
    return sorted(groups, key=lambda group: (-len(group[0]), group[0][0].code))


def _plain(words: object) -> str:
    """Words of any origin without escape sequences and control characters; what is markup already stays.

    Every expression of a template passes through here before its markup is escaped.
    """
    return words if isinstance(words, Markup) else plain(words, LONG)


def _prose(words: str) -> Markup:
    """Text in which backticks mark code."""
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(_plain(words)))))


def _steps(gallery: Gallery) -> list[dict[str, float | None]]:
    """Rows of the table of steps; each has the same columns."""
    columns: dict[str, dict[int, float]] = {}

    def add(name: str, steps: Sequence[int], values: Sequence[float]) -> None:
        columns[name] = dict(zip(steps, values, strict=True))

    gradient, kl, ratio = (gallery.drawn.get(kind) for kind in ("gradient", "kl", "ratio"))
    if isinstance(gradient, GradientData):
        add("|gradient|, L1", gradient.steps, gradient.whole)
        add("its policy part", gradient.steps, gradient.policy)
        add("its KL part", gradient.steps, gradient.kl)
        if gradient.fix is not None:
            add(f"changed by {gradient.fix}", gradient.steps, gradient.spurious)
            add(f"cosine with {gradient.fix}", gradient.steps, gradient.cosine)
    if isinstance(kl, KlData):
        add(f"{kl.metric} logged", kl.steps, kl.logged)
        add(f"{kl.metric} recomputed", kl.steps, kl.recomputed)
    if isinstance(ratio, RatioData):
        add("ratio below clip range", ratio.steps, ratio.below)
        add("ratio above clip range", ratio.steps, ratio.above)
    steps = sorted({step for values in columns.values() for step in values})
    return [{"step": step} | {name: values.get(step) for name, values in columns.items()} for step in steps]


def _page(words: str) -> Iterator[tuple[str, str]]:
    """The page of a rule, as tags and their text; its example is for programmers."""
    paragraph: list[str] = []
    shown_part = True
    for line in [*words.splitlines(), ""]:
        if line.startswith("## ") or not line.strip():
            if paragraph and shown_part:
                yield "p", " ".join(paragraph)
            paragraph = []
            if line.startswith("## "):
                shown_part = line != "## Example"
                if shown_part:
                    yield "h3", line[3:]
        else:
            paragraph.append(line.strip())

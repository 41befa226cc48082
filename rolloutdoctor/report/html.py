"""The page: one file that needs no network and no script, for people who want to read everything about a run."""

import html
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rolloutdoctor.report.concise import counts
from rolloutdoctor.report.html_style import CSS
from rolloutdoctor.report.style import plain, shown, value_of, where
from rolloutdoctor.results.figures import Gallery, GradientData, KlData, RatioData
from rolloutdoctor.results.findings import Finding, Report

MOST_STEPS = 200
"""Rows of a table of steps; what is left out is said."""

LONG = 2000


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
        definitions: code of a rule to its page in the rule book.
    """

    name: str
    report: Report
    drawings: Sequence[Drawing]
    gallery: Gallery
    definitions: Mapping[str, str]


def render(page: Page) -> str:
    """Render the page."""
    sections = [
        ("findings", "Findings", _findings(page.report)),
        ("pictures", "Pictures", _pictures(page)),
        ("steps", "Steps", _steps(page.gallery)),
        ("configuration", "Configuration", _configuration(page.report)),
        ("skipped", "Not checked, and how to record it", _skipped(page)),
        ("definitions", "How each number is defined", _definitions(page)),
    ]
    title = f"rolloutdoctor: {text(page.name)}"
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title}</title>",
        f"<style>{CSS}</style>",
        "</head>",
        "<body>",
        '<a class="skip" href="#findings">Skip to the findings</a>',
        *_header(page),
        '<nav aria-label="Sections"><ul>',
        *(f'<li><a href="#{key}">{name}</a></li>' for key, name, _ in sections),
        "</ul></nav>",
        "<main>",
    ]
    for key, name, body in sections:
        lines += [f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{name}</h2>', *body]
        lines.append("</section>")
    lines += [
        "</main>",
        "<footer><p>These are measurements of the rows, not proof of a broken run. Gradients are derivatives of the "
        "loss with respect to the logged log-probs, not to parameters.</p></footer>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def text(words: object, limit: int = LONG) -> str:
    """Words of any origin as text of the page: no markup, no escape sequences, no control characters."""
    return html.escape(plain(words, limit))


def _prose(words: str) -> str:
    """Text in which backticks mark code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", text(words))


def _header(page: Page) -> Iterator[str]:
    report, size = page.report, page.report.input
    worst = report.worst()
    who = f"{report.trainer} {report.trainer_version}" if report.trainer else "trainer unknown"
    yield f"<header><h1>rolloutdoctor: <span>{text(page.name)}</span></h1>"
    yield f'<p class="verdict {worst.label if worst else "clean"}">{counts(report)}.</p>'
    yield (
        f'<p class="soft">{text(who)}; {size.rows:,} rows in {size.groups:,} groups, {size.steps:,} steps, '
        f"{size.tokens:,} tokens; {report.device} {report.dtype}; rolloutdoctor {text(report.version)}</p>"
    )
    yield from (f'<p class="soft">{text(note)}</p>' for note in report.notes)
    yield "</header>"


def _findings(report: Report) -> Iterator[str]:
    if not report.findings:
        yield "<p>Nothing was checked.</p>" if report.nothing_checked else "<p>No findings.</p>"
    for found in report.findings:
        yield from _finding(found)
    if report.clean:
        names = ", ".join(f"{text(code)} {text(name)}" for code, name in report.clean)
        yield f"<p>Clean: {names}.</p>"


def _finding(found: Finding) -> Iterator[str]:
    label, key = found.severity.label, f"finding-{text(found.code)}"
    yield f'<article class="{label}" aria-labelledby="{key}">'
    yield f'<h3 id="{key}"><span class="label">{label}:</span> {text(found.headline)}</h3>'
    yield f'<p class="rule">{text(found.code)} {text(found.name)}, {text(found.verdict)}</p>'
    yield f"<p>{text(found.message)}</p>"
    yield f"<dl><dt>Evidence</dt><dd>{_prose(found.evidence)}</dd><dt>What to do</dt><dd>{_prose(found.advice)}</dd>"
    if found.examples:
        places = "".join(f"<li>{text(where(place))}</li>" for place in found.examples)
        yield f"<dt>Where</dt><dd><ul>{places}</ul></dd>"
    yield "</dl>"
    yield '<dl class="measures">'
    for name, measure in found.measures.items():
        unit = "" if measure.unit in ("1", "share", "step") else f" {text(measure.unit)}"
        name = text(name).replace("_", "_<wbr>")
        yield f"<div><dt><code>{name}</code></dt><dd>{text(shown(measure))}{unit}</dd></div>"
    yield "</dl>"
    links = [one for one in found.references if one.startswith("https://")]
    if links:
        yield f'<p class="soft">Read more: {", ".join(_link(one) for one in links)}</p>'
    if found.per_step:
        names = list(found.per_step[0])
        rows = [[_cell(row.get(name)) for name in names] for row in found.per_step]
        yield from _table(f"{found.code} by step", names, rows)
    yield "</article>"


def _link(address: str) -> str:
    return f'<a href="{text(address)}" rel="noreferrer">{text(address.removeprefix("https://"))}</a>'


def _pictures(page: Page) -> Iterator[str]:
    for drawing in page.drawings:
        if drawing.svg is None:
            words = f"{text(drawing.title)}: {text(drawing.note)}. There is no picture of {text(drawing.kind)} to draw."
            yield f'<p id="picture-{drawing.kind}">{words}</p>'
            continue
        yield f'<figure id="picture-{drawing.kind}"><figcaption><p class="title">{text(drawing.title)}</p>'
        yield f'<p class="soft">{text(drawing.note)}</p></figcaption>' if drawing.note else "</figcaption>"
        yield f'<div class="scroll" role="region" tabindex="0" aria-label="{text(drawing.kind)}">{drawing.svg}</div>'
        yield "</figure>"
    if not page.drawings:
        yield "<p>No picture can be drawn of this run.</p>"


def _steps(gallery: Gallery) -> Iterator[str]:
    columns: list[tuple[str, dict[int, float]]] = []
    gradient, kl, ratio = (gallery.drawn.get(kind) for kind in ("gradient", "kl", "ratio"))
    if isinstance(gradient, GradientData):
        columns.append(("|gradient|, L1", dict(zip(gradient.steps, gradient.whole, strict=True))))
        columns.append(("its policy part", dict(zip(gradient.steps, gradient.policy, strict=True))))
        columns.append(("its KL part", dict(zip(gradient.steps, gradient.kl, strict=True))))
        if gradient.fix is not None:
            columns.append((f"changed by {gradient.fix}", dict(zip(gradient.steps, gradient.spurious, strict=True))))
            columns.append((f"cosine with {gradient.fix}", dict(zip(gradient.steps, gradient.cosine, strict=True))))
    if isinstance(kl, KlData):
        columns.append((f"{kl.metric} logged", dict(zip(kl.steps, kl.logged, strict=True))))
        columns.append((f"{kl.metric} recomputed", dict(zip(kl.steps, kl.recomputed, strict=True))))
    if isinstance(ratio, RatioData):
        columns.append(("ratio below clip range", dict(zip(ratio.steps, ratio.below, strict=True))))
        columns.append(("ratio above clip range", dict(zip(ratio.steps, ratio.above, strict=True))))
    steps = sorted({step for _, values in columns for step in values})
    if not steps:
        yield "<p>No training step could be evaluated.</p>"
        return
    rows = [[str(step), *(_cell(values.get(step)) for _, values in columns)] for step in steps]
    yield from _table("Training steps", ["step", *(name for name, _ in columns)], rows)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table that is opened by its name; a long one is cut, and says so."""
    cut = f"the first {MOST_STEPS:,} of {len(rows):,} rows; --steps START:STOP shows others, check --format json all"
    caption = f"{name}: {cut if len(rows) > MOST_STEPS else f'{len(rows):,} rows'}"
    yield f"<details><summary>{text(name)}</summary>"
    yield f'<div class="scroll" role="region" tabindex="0" aria-label="{text(name)}"><table>'
    yield f"<caption>{text(caption)}</caption>"
    yield f"<thead><tr>{''.join(_head(one) for one in head)}</tr></thead><tbody>"
    for row in rows[:MOST_STEPS]:
        first = f'<th scope="row" class="number">{text(row[0])}</th>'
        cells = "".join(f'<td class="number">{text(cell)}</td>' for cell in row[1:])
        yield f"<tr>{first}{cells}</tr>"
    yield "</tbody></table></div></details>"


def _head(name: str) -> str:
    return f'<th scope="col" class="number">{text(name)}</th>'


def _configuration(report: Report) -> Iterator[str]:
    if not report.config:
        yield "<p>Nothing says which trainer made the run.</p>"
        return
    yield '<div class="scroll" role="region" tabindex="0" aria-label="Configuration"><table>'
    yield "<caption>Every option that can change a number, and where its value came from</caption>"
    yield '<thead><tr><th scope="col">option</th><th scope="col">value</th><th scope="col">from</th></tr></thead>'
    yield "<tbody>"
    for name, setting in report.config.items():
        origin = f'<span class="assumed">assumed: {text(setting.origin)}</span>'
        yield (
            f'<tr><th scope="row"><code>{text(name)}</code></th><td><code>{text(value_of(setting))}</code></td>'
            f"<td>{origin if setting.assumed else text(setting.origin)}</td></tr>"
        )
    yield "</tbody></table></div>"


def _skipped(page: Page) -> Iterator[str]:
    left_out = page.gallery.left_out
    if not page.report.skipped and not left_out:
        drawn = ", and every picture was drawn" if all(drawing.svg for drawing in page.drawings) else ""
        yield f"<p>Every rule ran{drawn}.</p>"
        return
    yield "<dl>"
    for one in page.report.skipped:
        yield f"<dt>{text(one.code)} {text(one.name)}</dt>"
        yield f"<dd>{_prose(one.reason)}. To run it: {_prose(one.remedy)}.</dd>"
    for kind, why in left_out.items():
        yield f"<dt>Picture: {text(kind)}</dt><dd>{text(why)}.</dd>"
    yield "</dl>"


def _definitions(page: Page) -> Iterator[str]:
    found = {one.code for one in page.report.findings}
    for code, words in page.definitions.items():
        title, _, body = words.partition("\n")
        opened = " open" if code in found else ""
        yield f"<details{opened}><summary>{text(code)}: {text(title)}</summary>"
        yield from _book(body.splitlines())
        yield "</details>"


def _book(lines: Iterable[str]) -> Iterator[str]:
    """A page of the rule book: headings, paragraphs and code words; its example is for programmers."""
    paragraph: list[str] = []
    shown_part = True
    for line in [*lines, ""]:
        if line.startswith("## ") or not line.strip():
            if paragraph and shown_part:
                yield f"<p>{_prose(' '.join(paragraph))}</p>"
            paragraph = []
            if line.startswith("## "):
                shown_part = line != "## Example"
                if shown_part:
                    yield f"<h3>{text(line[3:])}</h3>"
        else:
            paragraph.append(line.strip())

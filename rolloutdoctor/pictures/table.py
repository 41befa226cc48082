"""Every picture by name, and figures as bytes."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from rolloutdoctor.pictures import compare
from rolloutdoctor.pictures.style import plain_numbers, styled, words_alone
from rolloutdoctor.results.errors import InputError, UsageError, nearest
from rolloutdoctor.results.figures import ASKED, KINDS, PictureData
from rolloutdoctor.results.ledger import Why
from rolloutdoctor.results.run_comparison import RunComparison

Draw = Callable[[Any], Figure]
"""Takes the data of its own picture."""


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        draw: draws it.
        title: what it says, in a sentence.
        by_step: draws it with one panel for each band of steps, or None.
    """

    draw: Draw
    title: Callable[[Any], str]
    by_step: Draw | None = None


def _picture(kind: str) -> Picture:
    module = import_module(f"rolloutdoctor.pictures.{kind}")
    return Picture(module.draw, module.title, getattr(module, "draw_by_step", None))


PICTURES = {kind: _picture(kind) for kind in (*KINDS, *ASKED)}
"""Each is drawn by the module of its name."""

SENTENCE = 1.7
"""Height in inches of a picture in which there is nothing to be seen: its title, and why."""

SUFFIXES = {".png": "png", ".svg": "svg", ".pdf": "pdf"}


def known_by(kind: str, by: str | None) -> bool:
    """True if a picture is to be drawn by step.

    Raises:
        UsageError: if it has no such form.
    """
    if by is None:
        return False
    if by != "step":
        raise UsageError(f"no picture by {by!r} (known: step)")
    if PICTURES[kind].by_step is None:
        raise UsageError(f"--by step is for advantages; {kind} has its steps on an axis already")
    return True


def figure_of(kind: str, data: PictureData | Why, *, by_step: bool = False) -> Figure:
    """Draw a picture as a matplotlib figure; `by_step` is for those that have that form (`known_by`)."""
    picture = PICTURES[kind]
    with styled():
        figure = picture.draw(data) if not by_step or picture.by_step is None else picture.by_step(data)
        plain_numbers(figure)
        if words_alone(figure) is not None:
            figure.set_figheight(SENTENCE)
    return figure


def drawn_file(figure: Figure, kind: str, form: str) -> bytes:
    """Return a figure as a file's content, as `as_bytes` does.

    Raises:
        InputError: if there is nothing in it but words.
    """
    if (words := words_alone(figure)) is not None:
        raise InputError(f"no picture of {kind}: {words}")
    return as_bytes(figure, kind, form)


def compare_figure(result: RunComparison) -> Figure:
    """Draw two runs as a matplotlib figure."""
    with styled():
        figure = compare.draw(result)
        plain_numbers(figure)
    return figure


def format_for(name: str) -> str:
    """The format that a file's name asks for.

    Raises:
        UsageError: if it is none that can be written.
    """
    suffix = name[name.rfind(".") :].lower() if "." in name else ""
    if suffix not in SUFFIXES:
        close = nearest(suffix, list(SUFFIXES))
        raise UsageError(f"{name or repr(name)}: pictures are written as {', '.join(SUFFIXES)}{close}")
    return SUFFIXES[suffix]


def as_bytes(figure: Figure, kind: str, form: str, *, inline: bool = False) -> bytes:
    """Return a figure as a file's content, the same bytes each time.

    Args:
        figure: what to write.
        kind: name of the picture; identifiers inside an SVG depend on it, so that several fit in one page.
        form: ``png``, ``svg`` or ``pdf``.
        inline: for a page: text stays text, and nothing is painted behind it.
    """
    dates: dict[str, dict[str, str | None]] = {
        "png": {"Software": None},
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    target = io.BytesIO()
    with styled():
        mpl.rcParams["svg.hashsalt"] = f"rolloutdoctor-{kind}"
        mpl.rcParams["svg.fonttype"] = "none" if inline else "path"
        figure.savefig(target, format=form, metadata=dates[form], transparent=inline)
    return _named_in_order(target.getvalue()) if form == "svg" else target.getvalue()


def _named_in_order(svg: bytes) -> bytes:
    """Number the clip paths: matplotlib names some of them by an address in memory, another one each time."""
    names = {name: b"clip%d" % number for number, name in enumerate(re.findall(rb'<clipPath id="(\w+)"', svg))}
    return re.sub(rb"\b(p[0-9a-f]{10})\b", lambda match: names.get(match[1], match[1]), svg)

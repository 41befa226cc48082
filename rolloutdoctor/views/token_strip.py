"""The tokens of a row as a page shows them: coloured by gradient, or by the gap between sampler and trainer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from rolloutdoctor.results.escapes import visible_lines
from rolloutdoctor.results.row_views import RowView

LEVELS = 4
"""Strengths of a colour."""

HEAD, TAIL = 2000, 1000
"""Characters at the beginning and at the end of a long text that are shown."""

_LISTED = 5


@dataclass(frozen=True)
class Token:
    """One token of the strip: what stands there, its classes, and its numbers in words."""

    shown: str
    look: str
    words: str


@dataclass(frozen=True)
class Strip:
    """The tokens of a row.

    Attributes:
        tokens: in their order.
        color: what the colour says, empty: there is none.
        more: what the one colour says.
        less: what the other one says.
        line: what the line under a token says, empty: there is none.
        heaviest: place, id, gradient and gap of the tokens that weigh most, as text; empty names have no column.
        head: names of these columns.
    """

    tokens: tuple[Token, ...]
    color: str
    more: str
    less: str
    line: str
    heaviest: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]


def strip(row: RowView) -> Strip:
    """Colour the tokens of a row, and list those that weigh most."""
    has_gradient, has_gap = any(row.gradient), bool(row.gap)
    # An update goes down the gradient: it makes a token likelier where the derivative is negative.
    color, line = ([-value for value in row.gradient], row.gap) if has_gradient else (row.gap, ())
    colored, lined = _levels(color), _levels(line)
    tokens = []
    for place in range(row.tokens):
        look = [f"c{abs(level)}{'n' if level < 0 else 'p'}" for level in colored[place : place + 1] if level]
        look += [f"u{abs(level)}" for level in lined[place : place + 1] if level]
        if row.trained and not row.trained[place]:
            look.append("masked")
        # Tokens without an id are named by their place.
        shown = str(row.ids[place]) if row.ids else f"#{row.first + place}"
        tokens.append(Token(shown, " ".join(look), _words(row, place)))
    gradients = "weight in the gradient (derivative of the loss with respect to the token's log-prob)"
    gaps = "the trainer's log-prob minus the sampler's"
    heavy = sorted(range(len(color)), key=lambda place: -_size(color[place]))[:_LISTED]
    head = ("place", *(("id",) if row.ids else ()), *(("gradient",) if row.gradient else ()))
    return Strip(
        tokens=tuple(tokens),
        color=gradients if has_gradient else gaps if has_gap else "",
        more="the update makes it likelier" if has_gradient else "the trainer finds it likelier",
        less="less likely",
        line=gaps if has_gradient and has_gap else "",
        heaviest=tuple(_numbers(row, place) for place in heavy if _size(color[place])),
        head=head + (("gap, nats",) if has_gap else ()),
    )


def long_text(text: str) -> Markup:
    r"""A text of any origin on its lines: nothing in it is markup, and its control characters are shown escaped.

    >>> print(long_text("<b>\x1b[31m"))
    &lt;b&gt;\x1b[31m
    """
    if len(text) > HEAD + TAIL:
        left_out = len(text) - HEAD - TAIL
        text = f"{text[:HEAD]}\n... {left_out:,} characters left out ...\n{text[-TAIL:]}"
    return Markup(escape(visible_lines(text.replace("\r\n", "\n"))))


def _size(value: float) -> float:
    return abs(value) if math.isfinite(value) else 0.0


def _levels(values: Sequence[float]) -> list[int]:
    """Strengths from 1 to `LEVELS` with the sign of the value; 0 below an eighth of the largest."""
    most = max(map(_size, values), default=0.0)
    if not most:
        return [0] * len(values)
    parts = [LEVELS * _size(value) / most for value in values]
    return [round(math.copysign(part, value)) if part else 0 for part, value in zip(parts, values, strict=True)]


def _words(row: RowView, place: int) -> str:
    parts = [f"place {row.first + place}"]
    if row.gradient:
        parts.append(f"gradient {row.gradient[place]:.3g}")
    if row.gap:
        parts.append(f"gap {row.gap[place]:.3g} nats")
    if row.trained and not row.trained[place]:
        parts.append("masked")
    return ", ".join(parts)


def _numbers(row: RowView, place: int) -> tuple[str, ...]:
    cells = [f"{row.first + place:,}"]
    if row.ids:
        cells.append(str(row.ids[place]))
    if row.gradient:
        cells.append(f"{row.gradient[place]:.4g}")
    if row.gap:
        cells.append(f"{row.gap[place]:.4g}")
    return tuple(cells)

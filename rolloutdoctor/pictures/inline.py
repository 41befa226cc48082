"""A figure as a piece of a page: it takes the colours of the page and says in words what it shows."""

import html
import re

from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import ALARM, CAUTION, DARK, GUIDE, INK, PALE
from rolloutdoctor.pictures.table import as_bytes

COLORS = {
    INK: "currentColor",
    DARK: f"var(--dark, {DARK})",
    PALE: f"var(--pale, {PALE})",
    ALARM: f"var(--alarm, {ALARM})",
    CAUTION: f"var(--warning, {CAUTION})",
    GUIDE: f"var(--guide, {GUIDE})",
}

_PROLOG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*"([^>]*?)>', re.DOTALL)
_HEIGHT = re.compile(r'(<svg[^>]*?) height="[^"]*"', re.DOTALL)


def inline_svg(figure: Figure, kind: str, words: str, width: float = 10.0) -> str:
    """Return the figure as an SVG element, without its title and note, which the page tells as text.

    Args:
        figure: is changed.
        kind: name of the picture.
        words: what it says to those who do not see it.
        width: in inches; letters keep their size, so a narrow picture is for a narrow place.
    """
    if width < figure.get_figwidth():
        figure.set_figheight(figure.get_figheight() * (1 + width / figure.get_figwidth()) / 2)
        figure.set_figwidth(width)
    figure.suptitle("")
    figure.supxlabel("")
    text = as_bytes(figure, kind, "svg", inline=True).decode()
    text = _METADATA.sub("", _PROLOG.sub("", text, count=1))
    text = _SIZE.sub(r"\1\2>", _HEIGHT.sub(r"\1", text, count=1), count=1)
    for color, stands_for in COLORS.items():
        text = text.replace(color, stands_for)
    # Several pictures are in one page, and an identifier is there once.
    text = re.sub(r'\bid="', f'id="{kind}-', text)
    text = re.sub(r'href="#', f'href="#{kind}-', text)
    text = re.sub(r"url\(#", f"url(#{kind}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(words)}" ', 1).strip()

r"""Text that Markdown, and GitHub's reading of it, takes for nothing but text."""

import re
from collections.abc import Iterator, Sequence
from html import escape

from rolloutdoctor.views.style import plain

_SPECIAL = re.compile(r"[\\`*_{}\[\]|~#]")

_JOINER = "\u2060"
"""A word joiner: it has no width and breaks no line, and what it stands in is no address and no name."""

# Markdown links bare addresses, and GitHub people, issues and pull requests, wherever they stand outside of code: no
# backslash keeps it from that.
_LINKED = re.compile(r"(@)(?=[\w-])|(:)(?=//)|(www|WWW)(?=\.)|(#)(?=\d)|(GH-|gh-)(?=\d)", re.IGNORECASE)


def inert(words: str) -> str:
    r"""Escape what is markup, and break what would become a link or a mention.

    >>> ascii(inert("*see* https://a.b, @me"))
    "'\\\\*see\\\\* https:\\u2060//a.b, @\\u2060me'"

    Of HTML not even a backslash keeps a character inside an element, such as `<summary>`.

    >>> inert("<b>")
    '&lt;b&gt;'
    """
    broken = _unlinked(words)
    return escape(_SPECIAL.sub(lambda match: "\\" + match[0], broken), quote=False)


def _unlinked(words: str) -> str:
    return _LINKED.sub(lambda match: match[0] + _JOINER, words)


def safe(text: object, limit: int = 500) -> str:
    """Text from a file on one line that Markdown takes for text, cut to `limit` characters."""
    return inert(plain(text, limit))


def in_html(text: object, limit: int = 500) -> str:
    """Text from a file inside an element of HTML, where Markdown's backslashes mean nothing."""
    return escape(_unlinked(plain(text, limit)))


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> Iterator[str]:
    """Yield the lines of a table whose first `left` columns are words, the others numbers."""
    yield f"| {' | '.join(map(safe, head))} |"
    yield f"| {' | '.join('---' if column < left else '---:' for column in range(len(head)))} |"
    yield from (f"| {' | '.join(map(safe, line))} |" for line in lines)

"""Long lines of plain text, cut at spaces to the width of a terminal."""

import re
import textwrap
from collections.abc import Iterable, Iterator

_MARGIN = re.compile(r" *\S+ {2,}|(?: *)")
"""A word and the space to the column after it, or the space before a line that has no such column."""

_WIDEST_MARGIN = 30


def wrapped(lines: Iterable[str], width: int) -> Iterator[str]:
    r"""Yield lines of at most `width` columns: what is cut off stands below the column that it is of, or deeper.

    Words that are longer stay whole, so that they can be copied.

    >>> print("\n".join(wrapped(["kl      k3 of policy and reference", "  a b c d"], 16)))
    kl      k3 of
            policy
            and
            reference
      a b c d
    """
    for line in lines:
        if len(line) <= width:
            yield line
            continue
        match = _MARGIN.match(line)
        margin = match[0] if match is not None and len(match[0]) <= _WIDEST_MARGIN else ""
        deeper = " " * (len(margin) if margin.strip() else len(line) - len(line.lstrip(" ")) + 2)
        cut = textwrap.wrap(line, width, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)
        yield from cut or [line]

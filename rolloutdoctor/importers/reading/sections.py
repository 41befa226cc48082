"""Names that are printed below the sections that they are of, as YAML and indented JSON are."""

import re
from collections.abc import Iterable, Iterator

_PROCESS = re.compile(r"\([\w.:]{1,60} pid=[0-9]{1,9}[^()\n]{0,40}\) ")
_SECTION = re.compile(r"""(?:\S.{0,200}\s-\s)?( *)(['"]?)([a-z_]\w{0,60})\2:(?: \{)?\s*""")
"""A name without a value, in lower case: a title is none. A logger may put its own before the first line of a text."""


def sections_of(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each line with the names of the sections of its process that it is in, a dot behind each.

    >>> list(sections_of(["trainer:", "  lr: 1e-6", "seed: 3"]))
    [('trainer:', ''), ('  lr: 1e-6', 'trainer.'), ('seed: 3', '')]
    """
    processes: dict[str, list[tuple[int, str]]] = {}
    for line in lines:
        match = _PROCESS.match(line)
        text = line[match.end() :] if match else line
        within = processes.setdefault(match[0] if match else "", [])
        section = _SECTION.fullmatch(text)
        indent = len(text) - len(text.lstrip(" ")) if section is None else len(section[1])
        while within and within[-1][0] >= indent:
            within.pop()
        yield line, "".join(f"{name}." for _, name in within)
        if section is not None:
            within.append((indent, section[3]))

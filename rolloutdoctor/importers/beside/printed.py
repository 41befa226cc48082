"""Configurations that trainers print on the console before their first step."""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.beside.stated import VERL_TABLE, Stated, trainer_of
from rolloutdoctor.importers.logs.console import is_step
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import flat
from rolloutdoctor.results.errors import InputError, UsageError

_MOST = 2**18
"""Characters of a printed configuration; verl's has some 50 thousand, and Python's parser takes 500 bytes for each."""

_MOST_LINES = 20_000
"""Of a table of arguments, with what other processes print between them; slime's has some 1,000."""

_FIRST = re.compile(r"(.{0,200}?)(\{'" + VERL_TABLE + r"': \{.*)")
_BARE = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")
_TITLE = re.compile(r"(.{0,200}?)-{8,64} arguments -{8,64}\s*")
_END = re.compile(r"-{8,64} end of arguments -{8,64}")
_ARGUMENT = re.compile(r"  (\w{1,200}) (\.*) (.{0,1000})")


def read_printed(source: Source) -> Stated | None:
    """Read the configuration that verl, or Megatron for slime, prints before the first step; None if none is there.

    ``pprint(OmegaConf.to_container(config, resolve=True))`` (verl/trainer/main_ppo.py), and ``_print_args``
    (megatron/training/arguments.py). Ray puts the name of the process before each line, and lines of other processes
    between them.

    Raises:
        InputError: if there is one, and it is not whole.
    """
    lines = takewhile(lambda line: not is_step(line), lines_of(source))
    origin = f"printed config in {Path(source.name).name}"
    for line in lines:
        first, title = _FIRST.match(line), _TITLE.match(line)
        if first is not None:
            return Stated(origin, "verl", _verl(first[2], _following(lines, first[1]), source.name))
        if title is not None:
            values = dict(_arguments(_following(lines, title[1]), source.name))
            trainer = trainer_of(values)
            return None if trainer is None else Stated(origin, trainer, values)
    return None


def _following(lines: Iterable[str], prefix: str) -> Iterator[str]:
    """The lines after one that has something before it, without that; numbers in it, as of a clock, may differ."""
    shape = _shape(prefix)
    for line in lines:
        if _shape(line[: len(prefix)]) == shape:
            yield line[len(prefix) :]


def _shape(prefix: str) -> str:
    return re.sub(r"[0-9]", "0", prefix)


def _verl(first: str, lines: Iterator[str], name: str) -> Mapping[str, object]:
    parts: list[str] = []
    size, depth = 0, 0
    for line in chain([first], lines):
        parts.append(line)
        size += len(line) + 1
        depth += _opened(line)
        if depth <= 0 or size > _MOST:
            break
    try:
        if depth != 0 or size > _MOST:
            raise ValueError("not whole")
        with warnings.catch_warnings(action="ignore"):
            body = ast.literal_eval(_BARE.sub(r"'\1'", "\n".join(parts)))
        return flat(body, name)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, AttributeError, UsageError):
        raise InputError(f"{name}: the printed configuration of verl is not whole; its options are not read") from None


def _opened(line: str) -> int:
    """Braces that a line opens and does not close, outside its texts, which end where it ends."""
    depth, quote, escaped = 0, "", False
    for sign in line:
        if escaped or (sign == "\\" and quote):
            escaped = not escaped
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth += (sign == "{") - (sign == "}")
    return depth


def _arguments(lines: Iterator[str], name: str) -> Iterator[tuple[str, str]]:
    for line in islice(lines, _MOST_LINES):
        found = _ARGUMENT.fullmatch(line)
        if found is not None:
            yield found[1], found[3]
        elif _END.search(line):
            return
    raise InputError(f"{name}: the printed table of arguments has no end; its options are not read")

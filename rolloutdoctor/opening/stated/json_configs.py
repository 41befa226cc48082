"""The options that a log of JSON states beside its numbers: ``{"config": {"lr": 1e-6}, "steps": [...]}``."""

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from rolloutdoctor.io.locations.small_files import MOST_BYTES, flat, read_small
from rolloutdoctor.opening.stated.command_lines import assigned
from rolloutdoctor.opening.stated.settings import titled
from rolloutdoctor.results.errors import InputError

_TABLES = ("config", "cfg", "args", "arguments", "hparams", "hyperparameters", "hyperparams", "training_args")
"""Keys that say that a table is of options."""

_ARGUMENTS = ("argv", "command", "cmd")
"""Keys of a command line, as a text or a list of its words."""

_KINDS = ("type", "event", "kind")
"""Keys by which a row says that it holds options itself."""

_OF_A_MODEL = "architectures"
"""Key of the configuration of a model, which states nothing of the training."""

_MOST_LINES, _LONGEST = 20_000, 2**16
"""Lines of a file that are looked at, and the characters of one."""


def options_in_json(path: Path) -> dict[str, object]:
    """Return the settings that a JSON document, or the rows of JSON Lines, state; those with two values are left out.

    Raises:
        InputError: if the file cannot be read.
    """
    options: dict[str, object] = {}
    differing: set[str] = set()
    for table in _tables(path):
        for name, value in table.items():
            if options.setdefault(name, value) != value:
                differing.add(name)
    return {name: value for name, value in options.items() if name not in differing}


def _tables(path: Path) -> Iterator[Mapping[str, object]]:
    for body in _bodies(path):
        options = [body[name] for name in _TABLES if isinstance(body.get(name), Mapping)]
        if any(body.get(name) in _TABLES for name in _KINDS if isinstance(body.get(name), str)) and not options:
            options = [{name: value for name, value in body.items() if name not in _KINDS}]
        # What became of the words of a command says more than they do.
        options = options or [_of_command(body[name]) for name in _ARGUMENTS if name in body]
        for table in options:
            if isinstance(table, Mapping) and _OF_A_MODEL not in table:
                yield titled(flat(table, path.name))


def _of_command(words: object) -> dict[str, object]:
    if isinstance(words, list):
        words = shlex.join(map(str, words))
    return assigned(words) if isinstance(words, str) else {}


def _bodies(path: Path) -> Iterator[dict[str, object]]:
    """Yield the objects at the top of a file that may hold options."""
    if path.suffix == ".json":
        if path.stat().st_size <= MOST_BYTES:
            yield from _parsed(read_small(path, expected="a log", error=InputError))
        return
    marks = [f'"{name}"' for name in (*_TABLES, *_ARGUMENTS)]
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in islice(lines, _MOST_LINES):
            if len(line) <= _LONGEST and line.startswith("{") and any(mark in line for mark in marks):
                yield from _parsed(line)


def _parsed(text: str) -> Iterator[dict[str, object]]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(body, dict):
        yield body

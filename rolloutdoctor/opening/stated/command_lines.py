"""Options on the command line that a run was started with, as a console or the code of a notebook shows it."""

import re
import shlex
from collections.abc import Sequence
from itertools import islice

from rolloutdoctor.opening.stated.options import Stated, trainer_of

_MOST = 2**18
"""Characters of a command."""

_COMMAND = re.compile(r"(?:^|\s)(?:python[0-9.]*|torchrun|accelerate|deepspeed|swift|trl|uv run|ray job submit)\s.*")
_NAME = re.compile(r"[+~]*([A-Za-z_][\w.]{1,200})")
_VARIABLE = re.compile(r"""\s{0,20}(?:export )?([A-Za-z_]\w{0,60})=["']?([\w.+-]{1,60})["']?\s*(?:#.*)?""")
_REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w{0,60})\b\}?")
_FEWEST = 3
"""Options of a command line: one or two anybody may pass."""


def read_command_line(lines: Sequence[str], origin: str, likely: Sequence[str] = ()) -> Stated | None:
    """Read ``key=value`` and ``--key value`` of the first command that states a trainer's options."""
    for place, line in enumerate(lines):
        if "=" not in line and "--" not in line and not line.endswith("\\"):
            continue
        if _COMMAND.search(line) is None:
            continue
        text = line
        for more in islice(lines, place + 1, place + _FEWEST * 100):
            if not text.endswith("\\"):
                break
            text = f"{text[:-1]} {more.strip()}"
        values = assigned(text[:_MOST], lines[:place])
        trainer = trainer_of(values, likely)
        if trainer is not None and len(values) >= _FEWEST:
            return Stated(origin, trainer, values)
    return None


def assigned(command: str, before: Sequence[str] = ()) -> dict[str, object]:
    """Return the options of a command, with what the lines of a script before it assign to their variables."""
    variables = {match[1]: match[2] for line in before if (match := _VARIABLE.fullmatch(line)) is not None}
    command = _REFERENCE.sub(lambda found: variables.get(found[1], found[0]), command)
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    values: dict[str, object] = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.removeprefix("--").partition("=")
        match = _NAME.fullmatch(name.replace("-", "_") if word.startswith("--") else name)
        if match is not None and equals:
            values[match[1]] = value
        elif match is not None and word.startswith("--"):
            values[match[1]] = True if not after or after.startswith("--") else after
    # What stands for another value says nothing.
    return {name: value for name, value in values.items() if not {"$", "{"} & {*str(value)}}

"""Options on the command line that a run was started with, as a console, a script or a notebook shows it."""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby, islice, takewhile

from rolloutdoctor.importers.logs.numbers import number
from rolloutdoctor.opening.stated.options import FEWEST, Stated, stated_of

_MOST = 2**18
"""Characters of a command."""

_COMMAND = re.compile(
    r"(?:^|[\s!/`])(?:python[0-9.]*|torchrun|accelerate|deepspeed|swift|trl|uv run|ray job submit|llamafactory-cli)\s.*"
)
_NAME = re.compile(r"[+~]*([A-Za-z_][\w.]{1,200})")
_VARIABLE = re.compile(
    r"""\s{0,20}(?:export |local |readonly )?([A-Za-z_]\w{0,60})=(["']?)([\w.+-]{1,60})\2\s*(?:[#;].*)?"""
)
_COMPUTED = re.compile(r"\s{0,20}(?:export |local )?([A-Za-z_]\w{0,60})=\$\(\(([^()]{1,100})\)\)\s*(?:#.*)?")
_ARRAY = re.compile(r"\s{0,20}([A-Za-z_]\w{0,60})=\((.*)")
_REFERENCE = re.compile(r'"\$\{([A-Za-z_]\w{0,60})\[[@*]\]\}"|\$\{?([A-Za-z_]\w{0,60})\b(?:\[[@*]\])?\}?')
_SUM = re.compile(r"[0-9 ]{1,20}(?:[*+/-][0-9 ]{1,20}){0,8}")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_ALONE = re.compile(r"\s{0,20}--[A-Za-z][\w.-]{1,60}(?:=[^\s\\]{1,200})?(?: {1,4}[^\s\\]{1,200}){0,40}\s{0,20}\\?\s*")
_MOST_LINES = 300
"""Lines of a command, or of an array of arguments."""


def read_command_line(
    lines: Sequence[str], origin: str, likely: Sequence[str] = (), *, fewest: int = FEWEST
) -> Stated | None:
    """Read ``key=value`` and ``--key value`` of the first command that states a trainer's options, or settings."""
    commands = read_commands(lines, origin, likely, fewest=fewest)
    return next((command for command in commands if command.trainer is not None), None) or next(iter(commands), None)


def read_commands(
    lines: Sequence[str], origin: str, likely: Sequence[str] = (), *, fewest: int = FEWEST
) -> list[Stated]:
    """Read all commands that state a trainer's options, or settings; those that say the same are one."""
    commands: list[Stated] = []
    for place, line in enumerate(lines):
        is_part = "=" in line or "--" in line or "[@]" in line or line.rstrip().endswith("\\")
        if not is_part or line.lstrip().startswith("#") or _COMMAND.search(line) is None:
            continue
        if place and lines[place - 1].rstrip().endswith("\\") and _COMMAND.search(lines[place - 1]) is not None:
            # A launcher and what it launches are one command.
            continue
        command = stated_of(origin, assigned(_joined(lines, place), lines[:place]), likely, fewest=fewest)
        enough = command is not None and len(command.values) >= fewest
        if command is not None and enough and all(command.values != other.values for other in commands):
            commands.append(command)
    return commands


def read_options_alone(lines: Sequence[str], origin: str, likely: Sequence[str] = ()) -> Stated | None:
    """Read ``--key value`` on lines of their own, as a command is pasted without its beginning; None if there are two.

    A page of help, which has ``--lr LR``, is none.
    """
    blocks = [
        assigned(" ".join(line.strip().removesuffix("\\") for line in block))
        for is_alone, block in groupby(lines, lambda line: _ALONE.fullmatch(line) is not None)
        if is_alone
    ]
    option_blocks = [values for values in blocks if len(values) >= FEWEST]
    if len(option_blocks) != 1 or any(value == name.upper() for name, value in option_blocks[0].items()):
        return None
    return stated_of(origin, option_blocks[0], likely)


def _joined(lines: Sequence[str], place: int) -> str:
    """Return the command that begins at a line, with those in which it goes on, before which a console has ``>``."""
    text = lines[place].rstrip()
    for more in islice(lines, place + 1, place + _MOST_LINES):
        if not text.endswith("\\"):
            break
        text = f"{text[:-1]} {more.strip().removeprefix('>').strip()}"
    return text[:_MOST].rstrip("`")


def assigned(command: str, before: Sequence[str] = ()) -> dict[str, object]:
    """Return the options of a command, with what the lines of a script before it assign to their variables.

    >>> assigned("python x.py --lr $LR ${MORE[@]}", ["LR=1e-6", "N=$((2*4))", "MORE=(", "  --epochs $N # all", ")"])
    {'lr': '1e-6', 'epochs': '8'}
    >>> assigned("x.py --reward_weights 0.5 -1 --funcs a b --epochs 1 data.json | tee 2")
    {'reward_weights': ['0.5', '-1'], 'funcs': 'a', 'epochs': '1'}
    """
    variables = _variables(before)
    try:
        words = shlex.split(_referred(command, variables))
    except ValueError:
        words = _referred(command, variables).split()
    values: dict[str, object] = {}
    for place, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        match = _NAME.fullmatch(name.replace("-", "_") if word.startswith("--") else name)
        if match is not None and equals:
            values[match[1]] = value
        elif match is not None and word.startswith("--"):
            values[match[1]] = _behind(words[place + 1 :])
    # What stands for another value says nothing.
    return {name: value for name, value in values.items() if not {"$", "{"} & {*str(value)}}


def _behind(words: Sequence[str]) -> object:
    """Return what stands behind the name of an option: all of several numbers, the first of other words, or nothing."""
    numbers = [*takewhile(lambda word: number(word) is not None, words)]
    if len(numbers) > 1:
        return numbers
    return words[0] if words and not words[0].startswith("--") else True


def _referred(text: str, variables: dict[str, str]) -> str:
    return _REFERENCE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text)


def _variables(lines: Sequence[str]) -> dict[str, str]:
    """What a script assigns: words, sums of numbers, and arrays of arguments over several lines."""
    variables: dict[str, str] = {}
    rest = iter(lines)
    for line in rest:
        if "=" not in line:
            continue
        if (word := _VARIABLE.fullmatch(line)) is not None:
            variables[word[1]] = word[3]
        elif (computed := _COMPUTED.fullmatch(line)) is not None:
            value = _sum(_named(computed[2], variables))
            variables |= {computed[1]: value} if value else {}
        elif (array := _ARRAY.fullmatch(line)) is not None:
            parts = [part for part in _until_closed(array[2], rest) if not part.strip().startswith("#")]
            variables[array[1]] = _referred(" ".join(_COMMENT.sub("", part) for part in parts), variables)
    return variables


def _until_closed(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first.partition(")")[0]
    if ")" in first:
        return
    for line in islice(rest, _MOST_LINES):
        if line.strip().startswith(")"):
            return
        yield line


def _named(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$?\{?([A-Za-z_]\w{0,60})\}?", lambda match: variables.get(match[1], match[0]), text)


def _sum(text: str) -> str:
    """Return the product or sum of whole numbers, as a shell computes it from the left; empty if it is none."""
    if _SUM.fullmatch(text.strip()) is None:
        return ""
    parts = re.split(r"([*+/-])", text.replace(" ", ""))
    if len({*parts[1::2]}) > 1:
        return ""
    total = int(parts[0])
    for sign, part in zip(parts[1::2], map(int, parts[2::2]), strict=True):
        if sign == "/" and not part:
            return ""
        total = {"*": total * part, "+": total + part, "-": total - part, "/": total // max(part, 1)}[sign]
    return str(total)

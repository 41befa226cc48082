"""Options in Python code or its output: ``GRPOConfig(beta=0.04, ...)`` in a cell, or as it prints itself."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.opening.stated.command_lines import read_command_line
from rolloutdoctor.opening.stated.literals import LONGEST, UNKNOWN, Code, is_known, parsed
from rolloutdoctor.opening.stated.options import Stated, trainer_of

OF_TRL = "trl"
CLASSES = {"UnslothGRPOConfig": "unsloth", "GRPOConfig": OF_TRL, "RLOOConfig": "trl-rloo"}
"""End of the name of a class of options to the trainer, the longest first."""

_MOST_LINES = 1_000

_ENDINGS = ("Config", "Arguments", "Args", "Namespace")
"""Of names of classes of options; ``argparse`` calls those of a command a Namespace."""
_BEGINS = re.compile(rf"(?<![\w.'\"])((?:\w+\.)*\w*(?:{'|'.join(_ENDINGS)}))\((.*)$")
_FIELD = re.compile(r"\s*(\w{1,100})=(.{0,2000}?),?\s*")
_INSTALLED = re.compile(r"\btrl\s*==\s*v?([0-9][\w.]{0,30})")


def trainer_of_class(name: str) -> str | None:
    """Return the trainer that a class of options is of, by the end of its name."""
    return next((trainer for ending, trainer in CLASSES.items() if name.endswith(ending)), None)


def read_code(notebook: Notebook, origin: str, likely: Sequence[str] = ()) -> Stated | None:
    """Read the options that the code of a notebook states; the last call of a class of options counts.

    Nothing is run. Names stand for what they were given as literals before, and sums and products of those.
    """
    made: list[tuple[str, dict[str, object]]] = []

    def take(name: str, named: dict[str, object]) -> bool:
        trainer = trainer_of_class(name)
        if trainer is not None:
            made.append((trainer, named))
        return trainer is not None

    code = Code(take)
    for cell in notebook.code:
        code.follow(parsed(cell))
    if not made:
        code.follow_uncalled()
    text = "\n".join(notebook.code)
    if not made:
        return read_command_line(text.split("\n"), f"command line in {origin}", likely)
    trainer, named = made[-1]
    if trainer == OF_TRL and re.search(r"^\s*(?:from|import) unsloth\b", text, re.MULTILINE):
        trainer = "unsloth"
    release = _INSTALLED.search(text)
    values = {name: value for name, value in named.items() if is_known(value)}
    return Stated(origin, trainer, values, None if release is None else release[1], origin)


def read_printed_call(lines: Iterable[str], origin: str, likely: Sequence[str] = ()) -> Stated | None:
    """Read the options that ``print(training_args)`` wrote: one name and value a line, or all on one line."""
    lines = iter(lines)
    for line in lines:
        begins = _BEGINS.search(line) if any(f"{end}(" in line for end in _ENDINGS) else None
        if begins is None:
            continue
        # It prints itself as ``GRPOConfig(`` and a field a line up to ``)``.
        on_one_line = begins[2].strip()
        values = dict(_of_call(begins[2]) if on_one_line else _of_fields(list(_until_closed(lines))))
        trainer = trainer_of_class(begins[1]) or trainer_of(values, likely)
        if values and trainer is not None:
            return Stated(origin, trainer, values)
    return None


def _until_closed(lines: Iterator[str]) -> Iterator[str]:
    for line in islice(lines, _MOST_LINES):
        if line.strip() == ")":
            return
        yield line


def _of_fields(lines: Sequence[str]) -> Iterator[tuple[str, object]]:
    for line in lines:
        match = _FIELD.fullmatch(line)
        value = UNKNOWN if match is None else _literal(match[2])
        if match is not None and value is not UNKNOWN:
            yield match[1], value


def _of_call(arguments: str) -> Iterator[tuple[str, object]]:
    # Enumerations print as <Name.MEMBER: 'value'>.
    text = re.sub(r"<[\w.]{1,100}: ('[^'\n]{0,100}'|[0-9]{1,9})>", r"\1", arguments[:LONGEST])
    call = f"f({text[: text.rfind(')') + 1]}"
    # What is no literal prints as <function f at 0x7f>.
    found: list[dict[str, object]] = []

    def take(name: str, named: dict[str, object]) -> bool:
        found.append(named)
        return False

    code = Code(take)
    code.follow(parsed(call) if parsed(call).body else parsed(re.sub(r"<[^<>\n]{1,300}>", "_", call)))
    for named in found[-1:]:
        yield from ((name, value) for name, value in named.items() if is_known(value))


def _literal(text: str) -> object:
    enumeration = re.fullmatch(r"<[\w.]{1,100}: (.{1,100})>", text)
    try:
        return ast.literal_eval(enumeration[1] if enumeration else text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN

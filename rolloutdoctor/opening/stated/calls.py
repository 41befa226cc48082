"""Options in Python code or its output: ``GRPOConfig(beta=0.04, ...)`` in a cell, or as it prints itself."""

import ast
import operator
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.opening.stated.command_lines import read_command_line
from rolloutdoctor.opening.stated.options import Stated, trainer_of

OF_TRL = "trl"
CLASSES = {"UnslothGRPOConfig": "unsloth", "GRPOConfig": OF_TRL, "RLOOConfig": "trl-rloo"}
"""End of the name of a class of options to the trainer, the longest first."""

_LONGEST = 2**16
"""Characters of a cell, or of printed options."""
_MOST_LINES = 1_000

_PARSED = "Namespace"
"""What ``argparse`` calls the options of a command, which any program prints."""
_BEGINS = re.compile(rf"(?<![\w.'\"])((?:\w+\.)*\w*(?:{'|'.join(CLASSES)})|{_PARSED})\((.*)$")
_FIELD = re.compile(r"\s*(\w{1,100})=(.{0,2000}?),?\s*")
_INSTALLED = re.compile(r"\btrl\s*==\s*v?([0-9][\w.]{0,30})")
_MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)


def trainer_of_class(name: str) -> str | None:
    """Return the trainer that a class of options is of, by the end of its name."""
    return next((trainer for ending, trainer in CLASSES.items() if name.endswith(ending)), None)


def read_code(notebook: Notebook, origin: str) -> Stated | None:
    """Read the options that the code of a notebook states as literals; the last call of a class of options counts.

    Nothing is run. Names stand for what they were given as literals before, and sums and products of those.
    """
    names: dict[str, object] = {}
    stated: Stated | None = None
    code = "\n".join(notebook.code)
    release = _INSTALLED.search(code)
    is_unsloth = re.search(r"^\s*(?:from|import) unsloth\b", code, re.MULTILINE) is not None
    for cell in notebook.code:
        for node in ast.walk(parsed(cell)):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = _value(node.value, names)
            trainer = trainer_of_class(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            if trainer is None or not isinstance(node, ast.Call):
                continue
            values = _keywords(node, names)
            trainer = "unsloth" if is_unsloth and trainer == OF_TRL else trainer
            stated = Stated(origin, trainer, values, None if release is None else release[1], origin)
    return stated or read_command_line(code.split("\n"), f"command line in {origin}")


def read_printed_call(lines: Iterable[str], origin: str) -> Stated | None:
    """Read the options that ``print(training_args)`` wrote: one name and value a line, or all on one line."""
    lines = iter(lines)
    for line in lines:
        begins = _BEGINS.search(line) if "Config(" in line or f"{_PARSED}(" in line else None
        trainer = None if begins is None else trainer_of_class(begins[1])
        if begins is not None and begins[1] == _PARSED:
            values = dict(_of_call(begins[2]))
            trainer = trainer_of(values)
            if trainer is not None:
                return Stated(origin, trainer, values)
        if begins is None or trainer is None:
            continue
        # It prints itself as ``GRPOConfig(`` and a field a line up to ``)``.
        fields = [begins[2]] if begins[2].strip() else list(_until_closed(lines))
        values = dict(_of_call(begins[2]) if begins[2].strip() else _of_fields(fields))
        if values:
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
        value = _UNKNOWN if match is None else _literal(match[2])
        if match is not None and value is not _UNKNOWN:
            yield match[1], value


def _of_call(arguments: str) -> Iterator[tuple[str, object]]:
    # Enumerations print as <Name.MEMBER: 'value'>.
    text = re.sub(r"<[\w.]{1,100}: ('[^'\n]{0,100}'|[0-9]{1,9})>", r"\1", arguments[:_LONGEST])
    call = f"f({text[: text.rfind(')') + 1]}"
    # What is no literal prints as <function f at 0x7f>.
    for node in parsed(call).body or parsed(re.sub(r"<[^<>\n]{1,300}>", "_", call)).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _keywords(node.value, {}).items()


def parsed(code: str) -> ast.Module:
    """Return the code of a cell; nothing of one that is too long, or no Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(_MAGIC.sub("", code) if len(code) <= _LONGEST else "")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.Module([], [])


_UNKNOWN = object()
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_LARGEST = 2**53


def _keywords(call: ast.Call, names: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments with a name of a call, and those of ``**options`` that are a dict of literals."""
    values: dict[str, object] = {}
    for keyword in call.keywords:
        value = _value(keyword.value, names)
        if keyword.arg is not None:
            values[keyword.arg] = value
        elif isinstance(value, dict):
            values |= value
    return {name: value for name, value in values.items() if _is_known(value)}


def literal_of(node: ast.expr) -> object:
    """Return what an expression of literals is; an object of no known kind for any other."""
    return _value(node, {})


def _is_known(value: object) -> bool:
    return all(map(_is_known, value.values())) if isinstance(value, dict) else value is not _UNKNOWN


def _value(node: ast.expr, names: Mapping[str, object]) -> object:
    """Return what an expression is, of literals and names that stand for some; `_UNKNOWN` of any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id, _UNKNOWN)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = _value(node.left, names), _value(node.right, names)
        if all(isinstance(side, (int, float)) and abs(side) < _LARGEST for side in sides) and sides[1]:
            return _OPERATORS[type(node.op)](*sides)
        return _UNKNOWN
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return _keywords(node, names)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {key.value: _value(each, names) for key, each in pairs if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Subscript):
        table = _value(node.value, names)
        if isinstance(table, dict) and isinstance(node.slice, ast.Constant):
            return table.get(node.slice.value, _UNKNOWN)
        return _UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN


def _literal(text: str) -> object:
    enumeration = re.fullmatch(r"<[\w.]{1,100}: (.{1,100})>", text)
    try:
        return ast.literal_eval(enumeration[1] if enumeration else text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN

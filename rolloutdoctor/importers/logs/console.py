"""Console output of trainers: lines with numbers, and progress bars and anything else between them."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import STEPS, Entry, Tell, as_float, step_in
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.cells import decimal
from rolloutdoctor.io.locations.paths import Source, reason
from rolloutdoctor.results.errors import InputError

_SNIFFED = 2**20
"""Bytes that are looked through for a line with numbers: what is printed before training is seldom more."""

_LONGEST = 2**20
"""Bytes of a line; what is longer holds a text, or was never a line."""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# A pattern is tried at every character: a line without the literal text of one is not searched.
_BAR = re.compile(r"(?<![0-9])([0-9]{1,18})/([0-9]{1,18}) \[")
_BARE = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")
_WRAPPED = re.compile(r"^(?:np|numpy)\.\w+\((.*)\)$")
_VERL = re.compile(r"(?:^|\s)step:([0-9]{1,18}) - (\S.*)$")
_SLIME = re.compile(r"(?:^|\s|])(step|rollout|perf|eval|passrate|multi_turn) ([0-9]{1,18}): (?=\{)")
_TRAINER = {"loss", "grad_norm", "learning_rate", "reward", "kl"}
_SUMMARY = "train_runtime"


@dataclass(frozen=True)
class _Printed:
    """The numbers of one line: a step where the line has one, and what the line says it is."""

    step: int | None
    split: str
    values: dict[str, float | None]


class TrlConsole:
    """Console of the transformers Trainer: a Python dict a line, floats with four digits and no step.

    ``ProgressCallback.on_log`` and ``PrinterCallback.on_log`` (transformers/trainer_callback.py). Steps are counted
    from the lines: where a progress bar says how many steps there were, and the lines are that number's share, they
    are known; otherwise the lines are numbered.
    """

    def detect(self, path: Path) -> str | None:
        """Look for a dict with the names that every training logs."""
        is_it = any(_trl(line) is not None for line in _beginning(path))
        return "the console log of the transformers Trainer" if is_it else None

    def read(self, source: Source, tell: Tell) -> Iterator[Entry]:
        """Yield the dicts, with the steps that the progress bar gives."""
        found: list[_Printed] = []
        totals: Counter[int] = Counter()
        reached: dict[int, int] = {}
        for line in lines_of(source):
            bars = _BAR.findall(line) if " [" in line else []
            for done, total in ((int(done), int(total)) for done, total in bars):
                totals[total] += 1
                reached[total] = max(reached.get(total, 0), done)
            printed = _trl(line)
            if printed is not None:
                found.append(printed)
        logged = sum(one.split == TRAIN for one in found)
        # While it grows nobody knows; the lines that were counted keep their numbers.
        every = None if lines.is_growing() else _interval(logged, totals, reached)
        if every is None and any(one.step is None for one in found):
            tell(f"{source.name}: the lines have no step, and no progress bar gives it: they are numbered from 1")
        step = 0
        for one in found:
            step = one.step if one.step is not None else step + (every or 1) * (one.split == TRAIN)
            yield step, one.split, one.values


class VerlConsole:
    """Console of verl: ``step:3 - critic/score/mean:0.036 - ...`` a line.

    ``concat_dict_to_str`` (verl/utils/logger/aggregate_logger.py); Ray puts the name of the process before it.
    """

    def detect(self, path: Path) -> str | None:
        """Look for such a line."""
        is_it = any(_verl(line) is not None for line in _beginning(path))
        return "the console log of verl" if is_it else None

    def read(self, source: Source, tell: Tell) -> Iterator[Entry]:
        """Yield the lines with a step."""
        for line in lines_of(source):
            printed = _verl(line)
            if printed is not None and printed.step is not None:
                yield printed.step, printed.split, printed.values


class SlimeConsole:
    """Console of slime: ``step 3: {...}`` and ``rollout 3: {...}``, a Python dict behind its kind and number.

    ``train`` in slime/backends/megatron_utils/model.py and slime/observability/*_metrics.py.
    """

    def detect(self, path: Path) -> str | None:
        """Look for such a line."""
        is_it = any(_slime(line) is not None for line in _beginning(path))
        return "the console log of slime" if is_it else None

    def read(self, source: Source, tell: Tell) -> Iterator[Entry]:
        """Yield the lines with a number."""
        for line in lines_of(source):
            printed = _slime(line)
            if printed is not None and printed.step is not None:
                yield printed.step, printed.split, printed.values


def is_step(line: str) -> bool:
    """Tell a line with the numbers of a step of verl or slime."""
    return _verl(line) is not None or _slime(line) is not None


def _interval(logged: int, totals: Mapping[int, int], reached: Mapping[int, int]) -> int | None:
    """Return the steps that a line stands for: those of the progress bar that was drawn most and reached its end."""
    ended = [total for total in totals if reached[total] == total and logged and total % logged == 0]
    return max(ended, key=lambda total: (totals[total], total)) // logged if ended else None


def _trl(line: str) -> _Printed | None:
    start, end = line.find("{'"), line.rfind("}")
    if start < 0 or end < start or "'epoch'" not in line:
        return None
    row = _dict(line[start : end + 1])
    if row is None or _SUMMARY in row:
        return None
    is_eval = any(name.startswith("eval_") for name in row)
    values = _numbers({name.removeprefix("eval_"): value for name, value in row.items()})
    # Of programs built on transformers, ms-swift says the step in the line.
    step = step_in(next((row[name] for name in STEPS if "/max" in name and name in row), None))
    number = step if isinstance(step, int) and not isinstance(step, bool) else None
    return _Printed(number, EVAL if is_eval else TRAIN, values) if _TRAINER & values.keys() else None


def _verl(line: str) -> _Printed | None:
    match = _VERL.search(line) if "step:" in line else None
    if match is None:
        return None
    named = [part.rpartition(":") for part in match[2].split(" - ")]
    values = _numbers({name.strip(): value.strip() for name, _, value in named if name})
    return _Printed(int(match[1]), TRAIN, values) if any("/" in name for name in values) else None


def _slime(line: str) -> _Printed | None:
    # The end first: a pattern that looks for it behind every beginning takes the square of the line.
    match = _SLIME.search(line) if ": {" in line and line.rstrip().endswith("}") else None
    row = None if match is None else _dict(line[match.end() :].rstrip())
    if match is None or row is None:
        return None
    values = _numbers(row)
    is_eval = match[1] in ("eval", "passrate")
    named = any("/" in name for name in values)
    return _Printed(int(match[2]), EVAL if is_eval else TRAIN, values) if named else None


def _dict(text: str) -> dict[str, object] | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            row = ast.literal_eval(_BARE.sub(r"'\1'", re.sub(r"(?:np|numpy)\.\w+\(([^()]*)\)", r"\1", text)))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return row if isinstance(row, dict) and all(isinstance(name, str) for name in row) else None


def _numbers(row: Mapping[str, object]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, value in row.items():
        number = _number(value)
        if number is not None:
            found[name] = number
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str):
        wrapped = _WRAPPED.match(value)
        value = wrapped[1] if wrapped else value
    try:
        return decimal(value) if isinstance(value, str) else as_float(value)
    except (ValueError, OverflowError):
        return None


def _beginning(path: Path) -> Iterator[str]:
    """The first lines of a text file; nothing of one that is no text."""
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            start = file.read(_SNIFFED)
    except OSError:
        return
    # A file of JSON objects is looked at as such.
    if b"\0" not in start and not start.lstrip().startswith((b'{"', b"[{")):
        yield from map(_plain, start.replace(b"\r", b"\n").split(b"\n"))


def lines_of(source: Source) -> Iterator[str]:
    """All lines; what a progress bar drew over counts as lines, too, and what is too long as none."""
    try:
        with Path(source.path).open("rb") as file:
            rest = b""
            while block := file.read(lines.CHUNK_BYTES):
                *whole, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
                yield from (_plain(line) for line in whole if len(line) <= _LONGEST)
                rest = rest if len(rest) <= _LONGEST else b""
            if not lines.is_growing():
                yield _plain(rest)
    except OSError as error:
        raise InputError(f"{source.name}: {reason(error)}") from None


def _plain(raw: bytes) -> str:
    return _COLOURS.sub("", raw.decode("utf-8", "replace"))

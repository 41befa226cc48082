"""Console output of trainers: lines with numbers, and progress bars and anything else between them."""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.logs.base import STEPS, Entry, LogNotes, as_float, step_in
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
_BARE = re.compile(r"(?<=: )(-?(?:nan|inf|NaN|Infinity)|null)(?=[,}])")
_WRAPPED = re.compile(r"^(?:np|numpy)\.\w+\((.*)\)$")
_VERL = re.compile(r"(?:^|\s)step:([0-9]{1,18}) +- (\S.*)$")
_VERL_LENGTH = re.compile(r"Total training steps: ([0-9]{1,15})|Training Progress: .{0,60}/([0-9]{1,15}) \[")
_VERL_STEP = re.compile(r"(?:^|\s)step:[0-9]{1,18}(?: -.*)?\s*$")
_VERL_END = re.compile(r"[\w./@-]{0,200}:-?[0-9][0-9.e+-]{0,30}\s*")
_VERL_MORE = re.compile(r"(?:^|\s)- [\w./@-]{1,200}:(?:np\.\w{1,20}\()?-?(?:[0-9]|nan|inf|$)")
_SLIME = re.compile(r"(?:^|\s|])(step|rollout|perf|eval|passrate|multi_turn) ([0-9]{1,18}): (?=\{)")
_OPENS = re.compile(r"""\{['"]""")
_WITHOUT_BRACE = re.compile(r"""\s*(['"])[\w/.-]+\1: """)
_EPOCH = re.compile(r"""['"]epoch['"]""")
_MOST_LINES = 40
"""Lines of a dict: a terminal cuts long lines, and who pastes one breaks it."""

_MOST_PARTS = 1_000
"""Lines of a line of verl, which people print with a metric on each."""

_LONGEST_PART = 2**16
"""Characters of what is a part of a line; a terminal is narrower."""

_LONGEST_PARSED = 2**16
"""Characters of a dict that Python's parser reads, which takes 500 bytes for each; of a longer one, numbers alone."""

# A text without an end goes on to the end of the line: to look for one again behind each quote takes the square.
_TOKENS = re.compile(
    r"""('(?:[^'\\]|\\.)*+'?|"(?:[^"\\]|\\.)*+"?)"""
    r"""(?:\s?:\s?(-?(?:nan|inf|NaN|Infinity|[0-9.][0-9.e+-]{0,40}))(?=[,}]))?|([\[{(])|[\]})]"""
)

_MOST_BARS = 8
"""Progress bars that are tried, those that were drawn most: generation and downloads have theirs, too."""

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

    ``ProgressCallback.on_log`` and ``PrinterCallback.on_log`` (transformers/trainer_callback.py). The step is what the
    progress bar says that was drawn before the line. Where it is not drawn before each, but says how many steps there
    were, and the lines are that number's share, steps are counted; otherwise the lines are numbered.
    """

    def detect(self, path: Path) -> str | None:
        """Look for a dict with the names that every training logs."""
        is_it = any(_trl(line, LogNotes()) is not None for line in _joined(beginning(path)))
        return "the console log of the transformers Trainer" if is_it else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the dicts, with the steps that the progress bar gives."""
        found: list[_Printed] = []
        totals: Counter[int] = Counter()
        reached: dict[int, int] = {}
        drawn: dict[int, dict[int, int]] = {}
        for line in _joined(lines_of(source)):
            bars = _BAR.findall(line) if " [" in line else []
            for done, total in ((int(done), int(total)) for done, total in bars):
                totals[total] += 1
                reached[total] = max(reached.get(total, 0), done)
                drawn.setdefault(total, {})[len(found)] = done
            printed = _trl(line, notes)
            if printed is not None:
                found.append(printed)
        training = [place for place, one in enumerate(found) if one.split == TRAIN]
        # While it grows nobody knows; the lines that were counted keep their numbers.
        epochs = [found[place].values.get("epoch") or 0.0 for place in training]
        every, whole = (None, None) if lines.is_growing() else _interval(epochs, totals, reached)
        steps, length = (None, None) if lines.is_growing() else _positions(training, totals, drawn)
        notes.planned(whole if steps is None else length)
        if every is None and steps is None and any(one.step is None for one in found):
            notes.tell(f"{source.name}: the lines have no step, and no progress bar gives it: they are numbered from 1")
        step = 0
        for place, one in enumerate(found):
            counted = step + (every or 1) * (one.split == TRAIN)
            step = one.step if one.step is not None else counted if steps is None else steps.get(place, step)
            yield step, one.split, one.values


class VerlConsole:
    """Console of verl: ``step:3 - critic/score/mean:0.036 - ...`` a line.

    ``concat_dict_to_str`` (verl/utils/logger/aggregate_logger.py); Ray puts the name of the process before it.
    """

    def detect(self, path: Path) -> str | None:
        """Look for such a line."""
        is_it = any(_verl(line) is not None for line in _unbroken(beginning(path)))
        return "the console log of verl" if is_it else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the lines with a step."""
        for line in _unbroken(lines_of(source)):
            if "raining" in line and (length := _VERL_LENGTH.search(line)) is not None:
                notes.planned(int(length[1] or length[2]))
            printed = _verl(line)
            if printed is not None and printed.step is not None:
                yield printed.step, printed.split, printed.values


class SlimeConsole:
    """Console of slime: ``step 3: {...}`` and ``rollout 3: {...}``, a Python dict behind its kind and number.

    ``train`` in slime/backends/megatron_utils/model.py and slime/observability/*_metrics.py.
    """

    def detect(self, path: Path) -> str | None:
        """Look for such a line."""
        is_it = any(_slime(line) is not None for line in _joined(beginning(path)))
        return "the console log of slime" if is_it else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the lines with a number."""
        for line in _joined(lines_of(source)):
            printed = _slime(line)
            if printed is not None and printed.step is not None:
                yield printed.step, printed.split, printed.values


def is_step(line: str) -> bool:
    """Tell a line with the numbers of a step of verl or slime."""
    return _verl(line) is not None or _slime(line) is not None


def _interval(
    epochs: Sequence[float], totals: Mapping[int, int], reached: Mapping[int, int]
) -> tuple[int | None, int | None]:
    """Return the steps that a line stands for, and those of the progress bar that was drawn most and reached its end.

    Args:
        epochs: of the training lines; they grow evenly, but where the first step is logged as well.
        totals: times that a bar of so many steps was drawn.
        reached: the last step that it was drawn with.
    """
    logged = len(epochs)
    if not logged or abs(epochs[0] * logged - epochs[-1]) > 0.005 * (logged + 1) + 1e-3 * epochs[-1]:
        return None, None
    found: dict[int, int] = {}
    for total in (total for total in totals if reached[total] == total):
        # More than one number of steps gives as many lines; of these, logs mostly end with the training.
        least, most = total // (logged + 1) + 1, total // logged
        if total % logged == 0 or least == most:
            found[total] = most
    whole = max(found, key=lambda total: (totals[total], total), default=None)
    return (None, None) if whole is None else (found[whole], whole)


def _positions(
    training: Sequence[int], totals: Mapping[int, int], drawn: Mapping[int, Mapping[int, int]]
) -> tuple[dict[int, int] | None, int | None]:
    """Return the step of each training line that a bar gives which was drawn before every one, and the bar's total.

    Lines are as many steps apart as they are logged, but for the first and the last one.
    """
    for total in sorted(drawn, key=lambda total: (totals[total], total), reverse=True)[:_MOST_BARS]:
        steps = [drawn[total].get(place, 0) for place in training]
        gaps = [after - before for before, after in pairwise(steps)]
        if steps and min(steps) > 0 and min(gaps, default=1) > 0 and len({*gaps[1:-1]}) < 2:
            return dict(zip(training, steps, strict=True)), total
    return None, None


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Put the lines of a dict together that is broken over several."""
    held: list[str] = []
    size = 0
    for line in lines:
        size += len(line)
        if held and ("{" in line or len(held) == _MOST_LINES or size > _LONGEST_PARSED):
            yield from held
            held = []
        if held:
            held.append(line)
            if "}" in line:
                yield "".join(held)
                held = []
            continue
        *_, start = (-1, *(match.start() for match in _OPENS.finditer(line)))
        if start >= 0 and "}" not in line[start:]:
            held, size = [line], len(line)
        else:
            yield line
    yield from held


def _trl(line: str, notes: LogNotes) -> _Printed | None:
    # Who pastes a line may lose its first character.
    text = "{" + line if "{" not in line and _WITHOUT_BRACE.match(line) else line
    opened, end = _OPENS.search(text), text.rfind("}")
    if opened is None or end < opened.start() or not _EPOCH.search(text):
        return None
    row = dict_in(text[opened.start() : end + 1])
    if row is None or _SUMMARY in row:
        return None
    is_eval = any(name.startswith("eval_") for name in row)
    values = numbers_in({name.removeprefix("eval_"): value for name, value in row.items()})
    # Of programs built on transformers, ms-swift says the step in the line.
    step = step_in(next((row[name] for name in STEPS if "/max" in name and name in row), None), notes)
    number = step if isinstance(step, int) and not isinstance(step, bool) else None
    return _Printed(number, EVAL if is_eval else TRAIN, values) if _TRAINER & values.keys() else None


def _unbroken(lines: Iterable[str]) -> Iterator[str]:
    """Put the parts of a line of verl together that a terminal has cut, or that has a metric on each line."""
    held: list[str] = []
    for line in lines:
        if held and len(held) < _MOST_PARTS and _is_part(line, held[-1]):
            # A space is lost where the line was cut there.
            held.append(f" {line}" if held[-1].endswith(" -") or line.startswith("- ") else line)
            continue
        if held:
            yield "".join(held)
        held = [line] if _VERL_STEP.search(line) else []
        if not held:
            yield line
    if held:
        yield "".join(held)


def _is_part(line: str, before: str) -> bool:
    if len(line) > _LONGEST_PART or _VERL_STEP.search(line):
        return False
    return bool(_VERL_MORE.search(line) or _VERL_END.fullmatch(line) or before.endswith((" -", ":")))


def _verl(line: str) -> _Printed | None:
    match = _VERL.search(line) if "step:" in line else None
    if match is None:
        return None
    named = [part.rpartition(":") for part in match[2].split(" - ")]
    values = numbers_in({name.strip(): value.strip() for name, _, value in named if name})
    return _Printed(int(match[1]), TRAIN, values) if any("/" in name for name in values) else None


def _slime(line: str) -> _Printed | None:
    # The end first: a pattern that looks for it behind every beginning takes the square of the line.
    match = _SLIME.search(line) if ": {" in line and line.rstrip().endswith("}") else None
    row = None if match is None else dict_in(line[match.end() :].rstrip())
    if match is None or row is None:
        return None
    values = numbers_in(row)
    is_eval = match[1] in ("eval", "passrate")
    named = any("/" in name for name in values)
    return _Printed(int(match[2]), EVAL if is_eval else TRAIN, values) if named else None


def dict_in(text: str) -> dict[str, object] | None:
    """Return the dict that a text prints, of Python or of JSON; None if it is none. Of a long one, its numbers."""
    if len(text) > _LONGEST_PARSED:
        return _numbers_in_long_dict(text)
    try:
        with warnings.catch_warnings(action="ignore"):
            row = ast.literal_eval(_BARE.sub(r"'\1'", re.sub(r"(?:np|numpy)\.\w+\(([^()]*)\)", r"\1", text)))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    return row if isinstance(row, dict) and all(isinstance(name, str) for name in row) else None


def _numbers_in_long_dict(text: str) -> dict[str, object] | None:
    """Return the numbers of a dict by their names, with those in dicts and lists inside of it left out."""
    row: dict[str, object] = {}
    depth = 0
    for match in _TOKENS.finditer(text):
        name, value, opened = match.groups()
        if name is None:
            depth += 1 if opened else -1
        elif value is not None and depth == 1:
            row[name[1:-1]] = value
    return row or None


def numbers_in(row: Mapping[str, object]) -> dict[str, float | None]:
    """Return those values that print a number, also as numpy prints it."""
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


def beginning(path: Path) -> Iterator[str]:
    """Yield the first lines of a text file; nothing of one that is no text."""
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

"""Configurations that trainers print on the console before their first step."""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.logs.forms import is_step
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import flat
from rolloutdoctor.opening.stated.calls import read_printed_call
from rolloutdoctor.opening.stated.command_lines import read_command_line
from rolloutdoctor.opening.stated.literals import LONGEST, UNKNOWN, is_known, literal_of, parsed
from rolloutdoctor.opening.stated.options import VERL_TABLE, Stated, trainer_of
from rolloutdoctor.results.errors import InputError, UsageError

_MOST = 2**18
"""Characters of a printed configuration; verl's has some 50 thousand, and Python's parser takes 500 bytes for each."""

_MOST_LINES = 20_000
"""Of a table of arguments, with what other processes print between them; slime's has some 1,000."""

_HEAD = 50_000
"""Lines before the first step that are looked at."""

_FIRST = re.compile(r"(.{0,200}?)(\{'(?:" + VERL_TABLE + r"|checkpointing|data)':(?: \{.*|\s*$))")
_BARE = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")
_OF_A_DICT = re.compile(r"""\s*[{}\[\]()'"\d-].*[,{}\[\]():'"]\s*|\s*(?:True|False|None)[,}\]]*\s*""")
_TITLE = re.compile(r"(.{0,200}?)-{8,64} arguments -{8,64}\s*")
_END = re.compile(r"-{8,64} end of arguments -{8,64}")
_OPTION = re.compile(
    r"(?:.{0,150}?\b(?:INFO|DEBUG)\b.{0,60}?[\]:|-] {1,8})?\s{0,20}(?:- |--|\| |\W{1,3} )?"
    r"([\"']?)([A-Za-z_][\w.]{2,100})\1 {0,40}[:=|] {0,40}([^\s{}\[\],|]{1,200}),? {0,40}\|?\s*"
)
_ACCUMULATED = re.compile(r"Gradient [Aa]ccumulation steps = ([0-9]{1,6})\b")
"""What the transformers Trainer and Unsloth say before the first step."""
_LONGEST_OPTION = 400
_ASSIGNED = re.compile(r"(?<![\w.'\"/-])([a-z_]\w{2,60}) ?= ?([\w.+-]{1,40})(?=[,;|)\s]|$)")
_FEWEST = 3
"""Options on one line, ``lr=3e-06, beta=0.04, temperature=1.0``."""
_ARGUMENT = re.compile(r"  (\w{1,200}) (\.*) (.{0,1000})")


def read_printed(source: Source, likely: Sequence[str] = (), begins: int = 0) -> Stated | None:
    """Read the configuration that a run prints before its first step; None if none is there.

    ``pprint(OmegaConf.to_container(config, resolve=True))`` (verl/trainer/main_ppo.py), ``pprint.pprint(config)``
    behind "Final config:" (examples/run_grpo.py of NeMo-RL), ``_print_args``
    (megatron/training/arguments.py) for slime, ``print(training_args)`` of TRL's, and command lines with
    ``key=value``. Ray puts the name of the process before each line, and lines of other processes between them.

    Args:
        source: the console.
        likely: trainers that have names of its numbers, the likeliest first.
        begins: lines above the run, which are of runs before it; theirs is taken where it prints none.

    Raises:
        InputError: if there is one that cannot be read.
    """
    for first in dict.fromkeys((begins, 0)):
        own = takewhile(lambda line: not is_step(line), islice(lines_of(source), first, None))
        if (found := _in_head(list(islice(own, _HEAD)), source, likely)) is not None:
            return found
    return None


def _in_head(head: Sequence[str], source: Source, likely: Sequence[str]) -> Stated | None:
    origin = f"printed config in {Path(source.name).name}"
    for place, line in enumerate(head):
        first, title = _FIRST.match(line), _TITLE.match(line)
        if first is not None:
            text = [first[2], *_following(head[place + 1 :], first[1])]
            values, is_whole = _nested(text, source.name)
            trainer = trainer_of(values, likely)
            return None if trainer is None else Stated(origin, trainer, values, remark="" if is_whole else _cut(origin))
        if title is not None:
            table = list(islice(_following(head[place + 1 :], title[1]), _MOST_LINES))
            values = dict(_arguments(table))
            trainer, is_whole = trainer_of(values, likely), any(_END.search(line) for line in table)
            return None if trainer is None else Stated(origin, trainer, values, remark="" if is_whole else _cut(origin))
    return (
        read_printed_call(head, origin, likely)
        or read_command_line(head, f"command line in {Path(source.name).name}", likely)
        or _listed(head, origin, likely)
    )


def _cut(origin: str) -> str:
    return f"{origin} is cut off: options behind the cut are not known"


def _following(lines: Iterable[str], prefix: str) -> Iterator[str]:
    """The lines after one that has something before it, without that; numbers in it, as of a clock, may differ."""
    shape = _shape(prefix)
    for line in lines:
        if _shape(line[: len(prefix)]) == shape:
            yield line[len(prefix) :]


def _shape(prefix: str) -> str:
    return re.sub(r"[0-9]", "0", prefix)


def _nested(lines: Sequence[str], name: str) -> tuple[Mapping[str, object], bool]:
    """Return the options of a printed dict, without lines of others in it, and whether it has its end."""
    of_dict = [line for line in lines[1:] if _OF_A_DICT.fullmatch(line)]
    for text in (lines, [lines[0], *of_dict]):
        body, is_whole = _whole(text)
        try:
            with warnings.catch_warnings(action="ignore"):
                return flat(ast.literal_eval(_BARE.sub(r"'\1'", body)), name), is_whole
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError, AttributeError, UsageError):
            continue
    raise InputError(f"{name}: the printed configuration cannot be read; its options are not used")


def _whole(lines: Iterable[str]) -> tuple[str, bool]:
    """Return the text of a dict from its beginning, closed after its last whole item, and whether it has its end."""
    text = ""
    brackets: list[str] = []
    whole, closing = 0, ""
    for line in lines:
        quote, escaped = "", False
        for place, sign in enumerate(line, start=len(text) + 1):
            if escaped or (sign == "\\" and quote):
                escaped = not escaped
            elif quote:
                quote = "" if sign == quote else quote
            elif sign in "'\"":
                quote = sign
            elif sign in "{[(":
                brackets.append({"{": "}", "[": "]", "(": ")"}[sign])
            elif sign in "}])" and brackets:
                brackets.pop()
            elif sign == "," and not quote:
                whole, closing = place - 1, "".join(reversed(brackets))
        text += f"{line}\n"
        if not brackets or len(text) > _MOST:
            break
    return (text, True) if not brackets else (text[:whole] + closing, False)


def _arguments(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        match = _ARGUMENT.fullmatch(line)
        if match is not None:
            yield match[1], match[3]
        elif _END.search(line):
            return


def _listed(lines: Iterable[str], origin: str, likely: Sequence[str]) -> Stated | None:
    """Read options of which each is on a line of its own, ``learning_rate: 1e-06``, or all are in a dict on one line.

    They are taken if they tell a trainer.
    """
    values: dict[str, object] = {}
    for line in lines:
        match = _OPTION.fullmatch(line) if len(line) < _LONGEST_OPTION else None
        if match is not None:
            values.setdefault(match[2], match[3].strip("\"'"))
        elif (accumulated := _ACCUMULATED.search(line)) is not None:
            values.setdefault("gradient_accumulation_steps", accumulated[1])
        elif "{" in line and line.rstrip().endswith("}") and len(line) < LONGEST:
            values = _dict_of(line[line.index("{") :].strip()) | values
        elif (
            len(found := _ASSIGNED.findall(line) if line.count("=") >= _FEWEST and len(line) < LONGEST else ())
            >= _FEWEST
        ):
            values = dict(found) | values
    trainer = trainer_of(values, likely)
    return None if trainer is None else Stated(origin, trainer, values)


def _dict_of(text: str) -> dict[str, object]:
    """Return the options of a dict of Python or JSON on one line, if it is one."""
    body = parsed(re.sub(r"\b(true|false|null)\b", lambda word: _JSON[word[1]], text)).body
    found = literal_of(body[0].value) if body and isinstance(body[0], ast.Expr) else UNKNOWN
    # A line of a log may have options in it, such as the learning rate of its step.
    if not isinstance(found, dict) or found.keys() & _OF_A_LOG:
        return {}
    return {name: value for name, value in found.items() if is_known(value)}


_OF_A_LOG = {"loss", "train_loss", "grad_norm", "reward", "epoch", "step"}
_JSON = {"true": "True", "false": "False", "null": "None"}

"""Configurations that trainers print on the console before their first step."""

import ast
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

from rolloutdoctor.importers.logs.forms import is_step
from rolloutdoctor.importers.reading.sections import sections_of
from rolloutdoctor.importers.reading.text_lines import TRACEBACK, lines_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import flat
from rolloutdoctor.opening.stated.calls import literal, read_printed_call
from rolloutdoctor.opening.stated.command_lines import assigned, read_commands, read_options_alone
from rolloutdoctor.opening.stated.config_lines import on_config_line, on_own_line, on_settings_line
from rolloutdoctor.opening.stated.literals import LONGEST, UNKNOWN, is_known, literal_of, parsed
from rolloutdoctor.opening.stated.options import VERL_TABLE, ReadLog, Stated, stated_of
from rolloutdoctor.opening.stated.settings import own_title, title_of
from rolloutdoctor.results.errors import InputError, UsageError

_ANY = ReadLog()

_MOST = 2**18
"""Characters of a printed configuration; verl's has some 50 thousand, and Python's parser takes 500 bytes for each."""

_MOST_LINES = 20_000
"""Of a table of arguments, with what other processes print between them; slime's has some 1,000."""

_HEAD = 50_000
"""Lines before the first step that are looked at."""

_PASTED = 2_000
"""Lines below the first number, at most, of what somebody pasted."""
_OF_TRAINING = frozenset({"learning rate", "gradient accumulation", "epochs"})
"""What settings of a training are, and of no evaluation."""

_FIRST = re.compile(r"(.{0,200}?)(\{'(?:" + VERL_TABLE + r"|checkpointing|data)':(?: \{.*|\s*$))")
_BARE = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")
_OF_A_DICT = re.compile(r"""\s*[{}\[\]()'"\d-].*[,{}\[\]():'"]\s*|\s*(?:True|False|None)[,}\]]*\s*""")
_TITLE = re.compile(r"(.{0,200}?)-{8,64} arguments -{8,64}\s*")
_END = re.compile(r"-{8,64} end of arguments -{8,64}")
_OPTION = re.compile(
    r"(?:\([\w.:]{1,60} pid=[0-9]{1,9}[^()\n]{0,40}\) )?"
    r"(?:.{0,150}?\b(?:INFO|DEBUG)\b.{0,60}?[\]:|-] {1,8})?\s{0,20}(?:- |--|\| |\W{1,3} )?"
    r"([\"']?)([A-Za-z_][\w.]{0,100})\1 {0,40}[:=|│] {0,40}([^\s{}\[\],|│]{1,200}),? {0,40}[|│]?\s*"
)
_BANNER = re.compile(
    r"(Gradient Accumulation steps|Num Epochs|Total (?:optimization )?steps|(?:Instantaneous )?batch size per device|"
    r"Total (?:train )?batch size(?: \([^()\n]{1,60}\))?|Num GPUs used) = ([0-9,]{1,12})\b",
    re.IGNORECASE,
)
"""What the transformers Trainer and Unsloth say before the first step."""
_OF_BANNER = {
    "gradient": "gradient_accumulation_steps",
    "num epochs": "num_epochs",
    "total optimization": "total_steps",
    "total steps": "total_steps",
    "instantaneous": "per_device_train_batch_size",
    "batch": "per_device_train_batch_size",
    "total": "total_batch_size",
    "num gpus": "num_gpus",
}
"""Beginning of what they say, in lower case, to the name of the setting."""
BANNER_NAMES = frozenset(_OF_BANNER.values())
_PROCESS = re.compile(r"\((main_task|TaskRunner) pid=([0-9]{1,9})\b")
"""What Ray puts before a line of verl: the name of the task of which a run has one, and its process."""
_FAILED = "Error executing job with overrides: "
_COMMENTED = re.compile(r"""\s{0,40}#\s?[\w.]{1,100}\s?[=:]\s?["']?[\w.+-]{1,60}["']?,?\s*$""")
"""A setting that code, or a file of options, leaves out."""
_LONGEST_OPTION = 400
_OF_OTHERS = re.compile(
    r"(?i)\bllm engine\b|\bapi_server\b|\bnon-default args\b|\bsamplingparams\b|"
    r"\b(?:eval|evaluat(?:e|ed|ing|ion)|validat(?:e|ing|ion)|inference)\b"
)
"""Words of lines with options of a sampler, or of an evaluation."""
_OF_A_MODEL = re.compile(r"\b[A-Z]\w{2,60}Config \{\s*$")
_ASSIGNED = re.compile(r"(?<![\w.'\"/-])([a-z_]\w{1,60}) ?= ?([\w.+-]{1,40})(?=[,;|)\s]|$)")
_FEWEST = 3
"""Options on one line, ``lr=3e-06, beta=0.04, temperature=1.0``."""
_ARGUMENT = re.compile(r"  (\w{1,200}) (\.*) (.{0,1000})")


def read_printed(source: Source, log: ReadLog = _ANY) -> list[Stated]:
    """Read what a run prints of its options before its first step; those that tell a trainer come first.

    ``pprint(OmegaConf.to_container(config, resolve=True))`` (verl/trainer/main_ppo.py), ``pprint.pprint(config)``
    behind "Final config:" (examples/run_grpo.py of NeMo-RL), ``_print_args``
    (megatron/training/arguments.py) for slime, ``print(training_args)`` of TRL's, and command lines with
    ``key=value``. Ray puts the name of the process before each line, and lines of other processes between them.

    Args:
        source: the console.
        log: what its numbers say; where the run prints no options, those that runs before it print are taken.

    Raises:
        InputError: if there is one that cannot be read.
    """
    for lines in _heads(source, log):
        if configs := _in_head(lines, source, log):
            return configs
    return _behind(source, log)


def read_output(outputs: Sequence[Sequence[str]], source: Source, log: ReadLog) -> list[Stated]:
    """Read what a cell of a notebook prints above the only run in it, as `read_printed` does.

    Args:
        outputs: lines that each cell printed.
        source: the notebook.
        log: what its numbers say; its run begins behind a cell, and ends with another.
    """
    first, end = log.begins or (0, 0)
    lines = outputs[end - 1] if first < end <= len(outputs) else ()
    return _in_head([*islice(takewhile(lambda line: not is_step(line), lines), _HEAD)], source, log)


def _behind(source: Source, log: ReadLog) -> list[Stated]:
    """Read the command below the numbers of the only run, where people paste it.

    One without a group size and a setting of the training may be of an evaluation, one above an error of another run.
    """
    first = log.begins[1] if log.begins is not None and log.is_alone else 0
    lines = list(islice(lines_of(source), first, first + _PASTED + 1)) if first else []
    origin = f"command line in {Path(source.name).name}"
    if (overrides := _overrides(lines, origin, log.likely)) is not None:
        return [overrides]
    if len(lines) > _PASTED or any(TRACEBACK in line for line in lines):
        return []
    commands = read_commands(lines, origin, log.likely)
    alone = None if commands else read_options_alone(lines, origin, log.likely)
    commands += [] if alone is None else [alone]
    titles = {title_of(name) for command in commands for name in command.values}
    return commands if len(commands) == 1 and "group size" in titles and titles & _OF_TRAINING else []


def _overrides(lines: Sequence[str], origin: str, likely: Sequence[str]) -> Stated | None:
    """Return the overrides that hydra names where a run fails; those of the numbers above, if one task printed all."""
    place = next((at for at, line in enumerate(lines) if _FAILED in line), 0)
    if len({*_PROCESS.findall("\n".join(lines[:place]))}) != 1 or read_commands(lines[:place], origin, likely):
        return None
    words = literal(lines[place].partition(_FAILED)[2].strip())
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return stated_of(origin, assigned(shlex.join(words)), likely)


def _heads(source: Source, log: ReadLog) -> Iterator[list[str]]:
    """Yield the lines above the run as far as the numbers of the run before, and then all above these."""
    before, first = log.begins or (0, _HEAD)
    for start, end in dict.fromkeys([(before, first), (0, before or first)]):
        lines = islice(lines_of(source), start, min(end, start + _HEAD))
        yield list(takewhile(lambda line: not is_step(line), lines))


def _in_head(head: Sequence[str], source: Source, log: ReadLog) -> list[Stated]:
    name = Path(source.name).name
    tasks = dict(found for line in head if "pid=" in line for found in _PROCESS.findall(line))
    # What another start of the task printed above is of another run.
    head = [line for line in head if all(tasks[task] == pid for task, pid in _PROCESS.findall(line))] if tasks else head
    config = _whole_configuration(head, f"printed config in {name}", source.name, log.likely)
    if config is not None:
        return [config]
    call = read_printed_call(head, f"printed config in {name}", log.likely)
    listed = _listed(head, f"printed config in {name}", log)
    if call is not None and listed is not None and call.trainer is None and listed.trainer is None:
        call = replace(call, values={**listed.values, **call.values})
    origin = f"command line in {name}"
    commands = read_commands(head, origin, log.likely)
    # Of several starts the last one is the nearest above the numbers.
    command = next((one for one in reversed(commands) if one.trainer is not None), None)
    command = command or next(iter(commands), None) or read_options_alone(head, origin, log.likely)
    candidates = (call, command, listed)
    return sorted(filter(None, candidates), key=lambda candidate: candidate.trainer is None)


def _whole_configuration(lines: Sequence[str], origin: str, name: str, likely: Sequence[str]) -> Stated | None:
    """Return the last configuration that is printed as a whole; one that tells a trainer goes before any other."""
    candidates: list[Stated | None] = []
    for place, line in enumerate(lines):
        first, title = _FIRST.match(line), _TITLE.match(line)
        if first is not None:
            values, is_whole = _nested([first[2], *_following(lines[place + 1 :], first[1])], name)
        elif title is not None:
            table = list(islice(_following(lines[place + 1 :], title[1]), _MOST_LINES))
            values, is_whole = dict(_arguments(table)), any(_END.search(line) for line in table)
        else:
            continue
        candidates.append(stated_of(origin, values, likely, "" if is_whole else _cut(origin)))
    configs = [candidate for candidate in candidates if candidate is not None]
    return max(reversed(configs), key=lambda config: config.trainer is not None, default=None)


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
    end, closing = 0, ""
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
                end, closing = place - 1, "".join(reversed(brackets))
        text += f"{line}\n"
        if not brackets or len(text) > _MOST:
            break
    return (text, True) if not brackets else (text[:end] + closing, False)


def _arguments(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        match = _ARGUMENT.fullmatch(line)
        if match is not None:
            yield match[1], match[3]
        elif _END.search(line):
            return


def _listed(lines: Iterable[str], origin: str, log: ReadLog) -> Stated | None:
    """Read options of which each is on a line of its own, ``learning_rate: 1e-06``, or all are in a dict on one line.

    What is printed again with another value is a metric, or nobody knows which value counted.
    """
    values: dict[str, object] = {}
    nested: dict[str, object] = {}
    # The first step may be printed as sections, too.
    metrics: set[str] = {*log.names, *(name.replace("/", ".") for name in log.names)}
    changed: set[str] = set()
    configured: set[str] = set()
    for line, section in sections_of(_without_models(lines)):
        options, banner = _on_one_line(line), _BANNER.findall(line)
        of_settings = on_settings_line(line)
        if line_options := on_config_line(line) or (of_settings if of_settings.keys() - metrics else {}):
            configured |= line_options.keys()
        else:
            # ``Config: lr=1e-6`` is an option where ``lr`` is a metric, too.
            options = {name: value for name, value in options.items() if name not in configured & metrics}
        for table, prefix in ((values, ""), (nested, section)):
            of_line = {f"{prefix}{name}": value for name, value in options.items()}
            changed |= {name for name, value in of_line.items() if table.setdefault(name, value) != value}
            # Each run of several in one process has its own.
            table |= {_of_banner(words): number.replace(",", "") for words, number in banner}
    without = changed | (metrics - configured)
    full, bare = (
        stated_of(origin, {name: value for name, value in table.items() if name not in without}, log.likely)
        for table in (nested, values)
    )
    # Whose options are told by their names alone calls them so.
    return bare if full is None or (bare is not None and bare.trainer is not None) else full


def _without_models(lines: Iterable[str]) -> Iterator[str]:
    """The lines without the configurations of models, which say how others generated with them.

    ``logger.info(f"Model config {config}")`` and ``f"Generate config {config}"`` (transformers).
    """
    rest = iter(lines)
    for line in rest:
        if _OF_A_MODEL.search(line) is None:
            yield line
            continue
        for _ in takewhile(lambda more: not more.startswith("}"), islice(rest, _MOST_LINES)):
            pass


def _on_one_line(line: str) -> dict[str, object]:
    if _COMMENTED.match(line) is not None:
        return {}
    match = _OPTION.fullmatch(line) if len(line) < _LONGEST_OPTION else None
    if match is not None:
        return {match[2]: match[3].strip("\"'")}
    if len(line) < _LONGEST_OPTION and (option := on_own_line(line)):
        return option
    if len(line) >= LONGEST or _OF_OTHERS.search(line) is not None:
        return {}
    if "{" in line and line.rstrip().endswith("}"):
        return _dict_of(line[line.index("{") :].strip())
    if assigned := on_config_line(line) or on_settings_line(line):
        return {**assigned}
    options: dict[str, object] = dict(_ASSIGNED.findall(line)) if line.count("=") > 1 else {}
    return options if len(options) >= _FEWEST or (len(options) > 1 and all(map(own_title, options))) else {}


def _of_banner(words: str) -> str:
    return next(name for start, name in _OF_BANNER.items() if words.lower().startswith(start))


def _dict_of(text: str) -> dict[str, object]:
    """Return the options of a dict of Python or JSON on one line, if it is one."""
    body = parsed(re.sub(r"\b(true|false|null)\b", lambda word: _JSON[word[1]], text)).body
    literal = literal_of(body[0].value) if body and isinstance(body[0], ast.Expr) else UNKNOWN
    # A line of a log may have options in it, such as the learning rate of its step.
    if not isinstance(literal, dict) or literal.keys() & _OF_A_LOG:
        return {}
    return {name: value for name, value in literal.items() if is_known(value)}


_OF_A_LOG = {"loss", "train_loss", "grad_norm", "reward", "epoch", "step"}
_JSON = {"true": "True", "false": "False", "null": "None"}

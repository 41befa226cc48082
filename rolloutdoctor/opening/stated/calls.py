"""Options in Python code or its output: ``GRPOConfig(beta=0.04, ...)`` in a cell, or as it prints itself."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from rolloutdoctor.importers.reading.notebooks import Notebook
from rolloutdoctor.io.locations.small_files import flat
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.metric_names.training_kind import LOSSES, NOT_CHECKED, training_kind
from rolloutdoctor.opening.stated.command_lines import read_command_line, read_commands
from rolloutdoctor.opening.stated.literals import LONGEST, UNKNOWN, Code, is_known, parsed
from rolloutdoctor.opening.stated.options import ReadLog, Stated, stated_of, trainer_of
from rolloutdoctor.opening.stated.settings import titled

OF_TRL = "trl"
CLASSES = {"UnslothGRPOConfig": "unsloth", "GRPOConfig": OF_TRL, "RLOOConfig": "trl-rloo"}
"""End of the name of a class of options to the trainer, the longest first."""

OF_TRAINING = re.compile(
    r"(?:^|\.)\w*(?:GRPO|RLOO|PPO|PPOv2|DPO|NashMD|XPO|SFT|KTO|ORPO|CPO|BCO|GKD|Reward|Training)(?:Config|Arguments|Args)$"
)
POLICY = "GRPO|RLOO|PPO|OnlineDPO|NashMD|XPO"
_OF_POLICY = re.compile(POLICY)
"""Names of classes of options of trainings, and those of a policy by its rewards."""

_ANY = ReadLog()

_MOST_LINES = 1_000

_ENDINGS = ("Config", "Arguments", "Args", "Namespace")
"""Of names of classes of options; ``argparse`` calls those of a command a Namespace."""
_BEGINS = re.compile(rf"(?<![\w.'\"])((?:\w+\.)*\w*(?:{'|'.join(_ENDINGS)}))\((.*)$")
_OF_NO_TRAINING = re.compile(r"(?i)generation|sampling|lora|peft|quant|bitsandbytes|bytesconfig|model|tokenizer|eval")
"""Of names of classes whose values are no settings of the training."""
_OF_SERVER = "served_model_name"
"""An option of vLLM's server, which prints all of its own."""
_FIELD = re.compile(r"[\s│]*(\w{1,100})=(.{0,2000}?),?\s*")
_BARE = re.compile(r"(?!(?:None|True|False|nan|inf)$)[A-Za-z][\w-]{0,60}")
_INSTALLED = re.compile(r"\btrl\s*==\s*v?([0-9][\w.]{0,30})")


def trainer_of_class(name: str) -> str | None:
    """Return the trainer that a class of options is of, by the end of its name."""
    return next((trainer for ending, trainer in CLASSES.items() if name.endswith(ending)), None)


class _Made:
    """The options that code makes, and which of them a trainer took.

    Args:
        names: of the metrics of the run.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.all: list[tuple[str, dict[str, object]]] = []
        self._taken: list[tuple[str, dict[str, object]]] = []
        self.generation: dict[str, object] = {}
        self._has_rewards = "reward" in metric_quantities(names).values()
        self._kind = training_kind(names)

    def take(self, name: str, arguments: Sequence[object], named: dict[str, object]) -> bool:
        """Take a call; a trainer takes options as ``args``, ``config``, or its first argument, and may generate."""
        if name.endswith("rainer.generate"):
            self.generation |= {key: value for key, value in named.items() if is_known(value)}
        if name.endswith("Trainer"):
            candidates = [named.get("args"), named.get("config"), *arguments[:1]]
            self._taken += [call for call in self.all if any(call[1] is each for each in candidates)]
            return False
        is_options = OF_TRAINING.search(name) is not None
        self.all += [(name, named)] * is_options
        return is_options

    def of_the_run(self) -> tuple[str, dict[str, object]] | None:
        """Return the last options that are of the training whose numbers the log has; None if there are none."""
        fit = [call for call in self._taken or self.all if self._fits(call[0])]
        fit = fit or [call for call in self.all if self._fits(call[0])]
        return fit[-1] if fit else None

    def _fits(self, name: str) -> bool:
        if self._has_rewards:
            return _OF_POLICY.search(name) is not None or name.endswith("TrainingArguments")
        is_other = self._kind in NOT_CHECKED and self._kind != LOSSES
        return not is_other or _OF_POLICY.search(name) is None


def read_code(notebook: Notebook, origin: str, log: ReadLog = _ANY) -> list[Stated]:
    """Read the options that the code of a notebook states: those that were made last before the output of the run.

    Nothing is run. Names stand for what they were given as literals before, and sums and products of those.
    """
    calls = _Made(log.names)
    code = Code(calls.take)
    cells = [parsed(cell) for cell in notebook.code]
    end = len(cells) if log.begins is None else log.begins[1]
    for cell in cells[:end]:
        code.follow(cell)
    config = calls.of_the_run()
    if config is None:
        # Its cell may have been run before one above it; of several behind it nobody knows which.
        for cell in cells[end:]:
            code.follow(cell)
        if not calls.all:
            code.follow_uncalled()
        config = calls.of_the_run()
        if config is not None and end < len(cells) and len(calls.all) > 1:
            return [
                Stated(
                    origin,
                    None,
                    {},
                    remark=f"{origin}: options of several runs, none of which is known to be "
                    "the one that is read: they are not used",
                )
            ]
    text = "\n".join(notebook.code)
    if config is None:
        command = _command(notebook.code[:end], f"command line in {origin}", log)
        return [] if command is None else [command]
    values = {name: value for name, value in config[1].items() if is_known(value)}
    trainer = trainer_of_class(config[0])
    if trainer is None:
        return [Stated(origin, None, titled({**calls.generation, **values}))]
    if trainer == OF_TRL and re.search(r"^\s*(?:from|import) unsloth\b", text, re.MULTILINE):
        trainer = "unsloth"
    release = _INSTALLED.search(text)
    return [Stated(origin, trainer, values, None if release is None else release[1], origin)]


def _command(cells: Sequence[str], origin: str, log: ReadLog) -> Stated | None:
    """Read the command of the cell whose output the run is; else the one that tells its trainer, or the only one."""
    of_run = cells[-1].split("\n") if log.begins is not None and cells else []
    # One option is enough where the output of the run is below its command.
    command = read_command_line(of_run, origin, log.likely, fewest=1)
    others = read_commands("\n".join(cells).split("\n"), origin, log.likely) if command is None else []
    of_trainers = [other for other in others if other.trainer is not None] or (others if len(others) == 1 else [])
    return command or next(iter(of_trainers), None)


def read_printed_call(lines: Iterable[str], origin: str, likely: Sequence[str] = ()) -> Stated | None:
    """Read the options that ``print(training_args)`` wrote: one name and value a line, or all on one line.

    OpenRLHF's are nested: ``hierarchize`` (openrlhf/utils/config.py). open-instruct prints those of several classes one
    after another: ``main`` (open_instruct/grpo_fast.py).
    """
    settings: Stated | None = None
    for name, values in _printed_calls(iter(lines), origin):
        trainer = trainer_of_class(name) or trainer_of(values, likely)
        if values and trainer is not None:
            return Stated(origin, trainer, values)
        if settings is None and _OF_NO_TRAINING.search(name) is None and _OF_SERVER not in values:
            settings = stated_of(origin, values, likely)
    return settings


def _printed_calls(lines: Iterator[str], origin: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name of a class and its values, with those of other classes that follow without a line between."""
    name, values = "", dict[str, object]()
    for line in lines:
        begins = _BEGINS.search(line) if any(f"{end}(" in line for end in _ENDINGS) else None
        if name and (begins is None or trainer_of_class(begins[1])):
            yield name, values
            name, values = "", {}
        if begins is None:
            continue
        # It prints itself as ``GRPOConfig(`` and a field a line up to ``)``.
        on_one_line = begins[2].strip()
        fields = flat(dict(_of_call(begins[2]) if on_one_line else _of_fields(list(_until_closed(lines)))), origin)
        if not name:
            name, values = begins[1], fields
        elif _OF_NO_TRAINING.search(begins[1]) is None:
            values = fields | values
    if name:
        yield name, values


def _until_closed(lines: Iterator[str]) -> Iterator[str]:
    for line in islice(lines, _MOST_LINES):
        if line.strip("│, \t\r\n") == ")":
            return
        yield line


def _of_fields(lines: Sequence[str]) -> Iterator[tuple[str, object]]:
    fields = [match for match in map(_FIELD.fullmatch, lines) if match is not None]
    names = [match[1] for match in fields]
    # transformers prints fields in their order, and texts without quotes; in code a bare word is another name.
    is_bare = len(names) == len(lines) and names == sorted(names) and not any(line[:1].isspace() for line in lines)
    for name, text in ((match[1], match[2]) for match in fields):
        value = text if is_bare and _BARE.fullmatch(text) is not None else literal(text)
        if value is not UNKNOWN:
            yield name, value


def _of_call(arguments: str) -> Iterator[tuple[str, object]]:
    # Enumerations print as <Name.MEMBER: 'value'>.
    text = re.sub(r"<[\w.]{1,100}: ('[^'\n]{0,100}'|[0-9]{1,9})>", r"\1", arguments[:LONGEST])
    call = f"f({text[: text.rfind(')') + 1]}"
    # What is no literal prints as <function f at 0x7f>.
    named_arguments: list[dict[str, object]] = []

    def take(name: str, arguments: Sequence[object], named: dict[str, object]) -> bool:
        named_arguments.append(named)
        # Options of a part are a table in those of the whole.
        return name.endswith(_ENDINGS)

    code = Code(take)
    code.follow(parsed(call) if parsed(call).body else parsed(re.sub(r"<[^<>\n]{1,300}>", "_", call)))
    for named in named_arguments[-1:]:
        yield from ((name, value) for name, value in named.items() if is_known(value))


def literal(text: str) -> object:
    """Return the literal of Python, or the value of an enumeration, that a text prints; `UNKNOWN` if it is none."""
    enumeration = re.fullmatch(r"<[\w.]{1,100}: (.{1,100})>", text)
    try:
        return ast.literal_eval(enumeration[1] if enumeration else text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN

"""`training_args.bin` of the transformers Trainer: the fields of its pickled configuration, with nothing executed."""

import pickletools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.importers.beside.stated import Stated, is_other
from rolloutdoctor.io.archives import unarchived
from rolloutdoctor.io.locations.paths import natural_key
from rolloutdoctor.io.locations.small_files import read_small, read_small_bytes
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.dialects.table import dialect_of_class

NAME = "training_args.bin"

_MOST_BYTES = 2**20
"""Of a file: a hundred times what the Trainer writes."""

_MOST_STEPS = 100_000
"""Instructions of a pickle; a configuration has about a thousand."""

_LONGEST = 200
"""Characters or elements of a value."""

_TRAINERS = {"GRPOConfig": "trl", "RLOOConfig": "trl-rloo"}
_RELEASE = re.compile(r"^- TRL: (\S+)$", re.MULTILINE)

_OF_THE_MODEL = ("router_aux_loss_coef",)
"""Fields that mean nothing for most models, and the file does not say for which model they are."""


def find_training_args(folder: Path) -> Path | None:
    """The file that belongs to an output folder, its completions folder, or a checkpoint."""
    if folder.name == "completions":
        folder = folder.parent
    places = [*checkpoints(folder), folder]
    return next((place / NAME for place in places if (place / NAME).is_file()), None)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in an output folder, the newest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: natural_key(path.name), reverse=True)


def read_training_args(path: Path) -> Stated:
    """Read the options, and the release that the model card in the output folder names.

    ``Trainer._save`` (transformers/trainer.py) writes the file with `torch.save`, ``create_model_card``
    (trl/trainer/base_trainer.py) the card.

    Raises:
        InputError: if it is no such file, or of a trainer that is not known here.
    """
    checkpoint = path.parent.name.startswith("checkpoint-")
    origin = f"{path.parent.name}/{NAME}" if checkpoint else NAME
    found = _object(_pickle(path, origin), origin)
    kind = found.name.rpartition(" ")[2]
    trainer = next((name for ending, name in _TRAINERS.items() if kind.endswith(ending)), None)
    if trainer is None or is_other(found.name):
        raise InputError(
            f"{origin}: the options of {kind[:80]!r}, and what its trainer computes is not known here; "
            "if it computes what TRL does, give them with --trainer trl --set KEY=VALUE"
        )
    values = dict(_plain_fields(found.state))
    dialect = dialect_of_class(found.name)
    if dialect is not None:
        dialect.refuse(values, origin)
    cards = [place / "README.md" for place in (path.parent, path.parent.parent)[: 1 + checkpoint]]
    card = next((card for card in cards if card.is_file()), None)
    release = None if card is None else _release(card)
    return Stated(origin, trainer, values, release, "README.md" if release else "")


def _release(card: Path) -> str | None:
    try:
        found = _RELEASE.search(read_small(card, expected="", most=_MOST_BYTES, error=InputError))
    except InputError:
        return None
    return None if found is None else found[1][:_LONGEST]


def _pickle(path: Path, origin: str) -> bytes:
    """The pickle in an archive of `torch.save`, which stores it as it is."""
    content = read_small_bytes(
        path, name=origin, expected="its options are not read", most=_MOST_BYTES, error=InputError
    )
    try:
        members = unarchived(content)
    except ValueError:
        members = {}
    found = next((member for name, member in members.items() if name.endswith("/data.pkl")), None)
    if found is None:
        raise InputError(f"{origin}: not a whole archive of torch.save; its options are not read")
    return found


@dataclass
class _Inert:
    """What stands for anything that a pickle would import or build: its name, its arguments and its fields."""

    name: str
    arguments: tuple[object, ...] = ()
    state: dict[object, object] = field(default_factory=dict)


_MARK = object()


def _object(content: bytes, origin: str) -> _Inert:
    """Follow the instructions of a pickle with lists, dictionaries and `_Inert` alone.

    Raises:
        InputError: if it is damaged, or needs an instruction that no configuration needs.
    """
    try:
        for number, found in enumerate(_results(content)):
            if number > _MOST_STEPS:
                break
            if isinstance(found, _Inert):
                return found
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    raise InputError(f"{origin}: not the pickled options of a trainer; they are not read")


def _results(content: bytes) -> Iterator[object]:
    """Yield None after each instruction of protocol 2, which torch.save writes, and at the end the object."""
    stack: list[object] = []
    memo: dict[object, object] = {}

    def since_mark() -> list[object]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
        found = stack[at + 1 :]
        del stack[at:]
        return found

    for instruction, argument, _ in pickletools.genops(content):
        name = instruction.name
        if name == "STOP":
            yield stack[-1]
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_Inert(str(argument)))
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in _TUPLES:
            size = _TUPLES[name]
            stack[-size:] = [tuple(stack[-size:])]
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, made = stack.pop(), stack.pop()
            if not isinstance(made, _Inert) or not isinstance(arguments, tuple):
                raise ValueError("not called")
            stack.append(_Inert(made.name, arguments))
        elif name == "BUILD":
            state, target = stack.pop(), stack[-1]
            if isinstance(target, _Inert) and isinstance(state, dict):
                target.state = state
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            pairs = zip(items[::2], items[1::2], strict=True)
            if isinstance(stack[-1], dict):
                # A key of another kind could take for ever to hash.
                stack[-1].update({key: value for key, value in pairs if isinstance(key, str)})
        elif name in ("APPEND", "APPENDS"):
            items = since_mark() if name == "APPENDS" else [stack.pop()]
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif name == "BINPERSID":
            stack[-1] = _Inert("a tensor")
        elif isinstance(argument, (str, int, float, bytes)) and not instruction.stack_before:
            stack.append(argument)
        elif name != "PROTO":
            raise ValueError(name)
        yield None


_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _plain_fields(state: dict[object, object]) -> Iterator[tuple[str, object]]:
    for name, value in state.items():
        # An enumeration is called with its value.
        if isinstance(value, _Inert) and len(value.arguments) == 1:
            value = value.arguments[0]
        parts = value if isinstance(value, list) else [value]
        if len(parts) <= _LONGEST and all(map(_is_plain, parts)) and name not in _OF_THE_MODEL:
            yield str(name), value


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, float, type(None))) or (
        (isinstance(value, str) and len(value) <= _LONGEST) or (isinstance(value, int) and abs(value) < 2**63)
    )

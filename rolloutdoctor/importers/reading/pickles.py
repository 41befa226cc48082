"""Pickles of dumps and of options: looked through first, then loaded with nothing of them imported or run.

A pickle of a hundred bytes can ask for a memo of any size, for lists that hold each other 2^45 times, and for hashes
and destructors that never end; all of that happens in C, where no signal is heeded. So its instructions are followed
beforehand with sizes in place of values.
"""

import pickle
import pickletools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from mmap import mmap
from typing import BinaryIO

_MOST_REPEATED = 2**24
"""Values that are reached once more, where a list or tuple is in several places."""

_DEEPEST = 100
"""Levels of nesting: whoever hashes, prints or frees a value goes down into it, by recursion."""

_MOST_NAMES = 10_000
"""Classes and functions that a pickle names."""

_LONGEST_NAME = 1000

_LONGEST_NUMBER = 256
"""Bytes of a whole number; beyond some 1,700 it could not even be printed."""

_NUMBERS = re.compile(rb"\((?:K.|M..|J.{4}|G.{8}|[N\x88\x89])*+e", re.DOTALL)
"""A mark, plain numbers, and APPENDS: lists of tokens are read in one go."""

_PLAIN = (
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
)
_EMPTY = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "EMPTY_TUPLE", "GLOBAL")
_MADE_OF = {
    **{"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "TUPLE": None, "FROZENSET": None},
    **{"STACK_GLOBAL": 2, "REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "BINPERSID": 1},
}
"""Instructions that make one value of others: how many; None: of all behind the mark."""

_ADDS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1, "APPENDS": None, "SETITEMS": None, "ADDITEMS": None}
"""Instructions that put values into the one before them."""

_GETS = ("BINGET", "LONG_BINGET")
_PUTS = ("BINPUT", "LONG_BINPUT")
_KNOWN = {*_PLAIN, *_EMPTY, *_MADE_OF, *_ADDS, *_GETS, *_PUTS, "MEMOIZE", "MARK", "POP", "STOP", "PROTO", "FRAME"}
_INSTRUCTIONS = {ord(each.code): each for each in pickletools.opcodes if each.name in _KNOWN}
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


@dataclass(slots=True)
class _Container:
    """Stands for a value that holds others.

    Attributes:
        size: values that are reached from it, each as often as there are ways.
        depth: levels of nesting.
        is_shared: True once it was fetched from the memo: whoever holds it has counted it as it was.
    """

    size: int = 1
    depth: int = 1
    is_shared: bool = False

    def add(self, items: "list[int | _Container]") -> None:
        """Count items that are put into it."""
        for item in items:
            if isinstance(item, _Container):
                self.size += item.size
                self.depth = max(self.depth, item.depth + 1)
            else:
                self.size += item
        if self.depth > _DEEPEST:
            raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


@dataclass
class _Followed:
    """Follows the instructions of a pickle with sizes in place of values; a plain value has the size 1."""

    content: bytes | mmap
    stacks: "list[list[int | _Container]]" = field(default_factory=lambda: [[]])
    memo: "dict[int, int | _Container]" = field(default_factory=dict)
    repeated: int = 0

    def run(self) -> None:
        """Follow them to the end."""
        for name, argument in self.instructions():
            stack = self.stacks[-1]
            if name in _ADDS:
                items, target = self.taken(_ADDS[name]), self.stacks[-1][-1]
                if not isinstance(target, _Container) or (target.is_shared and name != "BUILD"):
                    raise ValueError("its lists hold themselves, or grow after they were stored")
                target.add(items)
            elif name in _MADE_OF:
                container = _Container()
                container.add(self.taken(_MADE_OF[name]))
                self.stacks[-1].append(container)
            elif name == "MARK":
                self.stacks.append([])
                if len(self.stacks) > _DEEPEST:
                    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
            elif name == "POP":
                stack.pop()
            elif name in _GETS:
                stack.append(self.fetched(argument))
            elif name in _PUTS or name == "MEMOIZE":
                self.memo[argument if name in _PUTS else len(self.memo)] = stack[-1]
            elif name in _EMPTY:
                stack.append(_Container())
            elif name in _PLAIN:
                stack.append(1)

    def taken(self, count: int | None) -> "list[int | _Container]":
        """The last values, or all behind the mark."""
        if count is None:
            return self.stacks.pop()
        stack = self.stacks[-1]
        if len(stack) < count:
            raise ValueError("it is damaged")
        items = stack[-count:]
        del stack[-count:]
        return items

    def fetched(self, place: int) -> "int | _Container":
        """A value of the memo, which is in one more place now."""
        value = self.memo[place]
        if isinstance(value, _Container):
            value.is_shared = True
            self.repeated += value.size
            if self.repeated > _MOST_REPEATED + 4 * len(self.content):
                raise ValueError("its lists hold each other many times over")
        return value

    def instructions(self) -> Iterator[tuple[str, int]]:
        """Yield name and number of each; plain numbers up to APPENDS are one value, of their bytes as size."""
        at, end = 0, len(self.content)
        while at < end:
            code = self.content[at]
            if code == 40 and (numbers := _NUMBERS.match(self.content, at)):
                self.stacks[-1].append(numbers.end() - at)
                yield "APPEND", 0
                at = numbers.end()
                continue
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError("it has an instruction that no dump needs")
            at, number = self.argument(instruction, at + 1)
            yield instruction.name, number
            if instruction.name == "STOP":
                return
        raise ValueError("it has no end")

    def argument(self, instruction: pickletools.OpcodeInfo, at: int) -> tuple[int, int]:
        """Where the argument of an instruction ends, and its number, or length."""
        if instruction.arg is None:
            return at, 0
        width = instruction.arg.n
        if width == pickletools.UP_TO_NEWLINE:
            lines = re.compile(rb"[^\n]{0,%d}\n[^\n]{0,%d}\n" % (_LONGEST_NAME, _LONGEST_NAME)).match(self.content, at)
            if lines is None:
                raise ValueError("it names something without an end")
            return lines.end(), 0
        is_length = width < 0
        width = _LENGTHS.get(width, width)
        number = int.from_bytes(self.content[at : at + width], "little")
        at += width + number * is_length
        is_inside = at <= len(self.content) and (instruction.name != "FRAME" or number <= len(self.content))
        if not is_inside or (instruction.name in _PUTS and number > len(self.content)):
            raise ValueError("it declares more than it holds")
        if instruction.name == "LONG1" and number > _LONGEST_NUMBER:
            raise ValueError("it holds a whole number that is too long")
        return at, number


def check_pickle(content: bytes | mmap) -> None:
    """Check that loading a pickle, and hashing or walking through what it holds, takes time and memory by its size.

    Raises:
        ValueError: if it does not, or is damaged; the message says why, as a sentence about `it`.
    """
    try:
        _Followed(content).run()
    except (LookupError, TypeError):
        raise ValueError("it is damaged") from None


class Inert:
    """Stands for whatever a pickle would import or build.

    Attributes:
        name: module and name of the class or function, with a space between them.
        arguments: that it is called with.
        state: of an object; empty unless it is a dictionary.
    """

    name = ""

    def __new__(cls, *arguments: object, **more: object) -> "Inert":
        """Make one of any arguments."""
        instance = super().__new__(cls)
        instance.arguments, instance.state = arguments, {}
        return instance

    arguments: tuple[object, ...]
    state: dict[object, object]

    def __setstate__(self, state: object) -> None:
        """Keep the fields of an object."""
        if isinstance(state, dict):
            self.state = state

    def append(self, item: object) -> None:
        """Take an item of what would be a list."""

    def extend(self, items: object) -> None:
        """Take items of what would be a list."""

    def __setitem__(self, key: object, value: object) -> None:
        """Take an item of what would be a dictionary."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, functions: Mapping[str, Callable[..., object]]) -> None:
        super().__init__(file)
        self._named: dict[str, Callable[..., object]] = dict(functions)

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Return what stands for a class or a function."""
        full = f"{module} {name}"
        if name in self._named:
            return self._named[name]
        if full not in self._named:
            if len(self._named) > _MOST_NAMES:
                raise ValueError("it names too many classes")
            self._named[full] = type("Inert", (Inert,), {"name": full})
        return self._named[full]

    def persistent_load(self, pid: object) -> object:
        """Return what stands for a tensor's storage."""
        return Inert(pid)


def load_inert(file: BinaryIO, functions: Mapping[str, Callable[..., object]]) -> object:
    """Load a pickle that `check_pickle` has accepted, with `Inert` for everything that it names.

    Args:
        file: at the beginning of the pickle.
        functions: those names that stand for a function here.

    Raises:
        ValueError: if it is damaged.
    """
    try:
        return _Unpickler(file, functions).load()
    except OSError:
        raise
    except Exception:  # a damaged pickle makes the unpickler raise anything
        raise ValueError("it is damaged") from None

"""Files that the running command reads, so that it writes over none of them."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.io.run import Run


class _Command:
    def __init__(self) -> None:
        self.files: list[str] = []
        self.runs: list[Run] = []
        self.targets: list[Target] = []


_commands: list[_Command] = []


@contextmanager
def command() -> Iterator[None]:
    """Begin a command, which has read nothing yet."""
    _commands.append(_Command())
    try:
        yield
    finally:
        _commands.pop()


def note_file(path: "str | os.PathLike[str]") -> None:
    """Note a file that was read: options, a state."""
    if _commands:
        _commands[-1].files.append(os.fspath(path))


def note_run(run: "Run") -> None:
    """Note the files of a run, and that a result which is printed must not go into one of them.

    Raises:
        UsageError: if standard output is appended to a file of the run.
    """
    if _commands:
        _commands[-1].runs.append(run)
    printed = _standard_output()
    if printed is not None:
        refuse_inputs(printed)


def refuse_inputs(target: Target) -> None:
    """Refuse to write to a file that this command reads.

    Raises:
        UsageError: if the target is one.
    """
    for each in _commands[-1:]:
        for run in each.runs:
            target.refuse(run.inputs, "is a file of the run itself")
        target.refuse(each.files)


def claim(target: Target) -> None:
    """Note what will be written, and refuse what is written already or read.

    Raises:
        UsageError: if the target is an input, or another output of this command.
    """
    refuse_inputs(target)
    for each in _commands[-1:]:
        if not target.streams and any(other.path == target.path for other in each.targets):
            raise UsageError(f"{target.name}: two results would go there; name another file for one of them")
        each.targets.append(target)


def _standard_output() -> Target | None:
    """Standard output, if it is a file."""
    try:
        number = sys.stdout.fileno()
        status = os.fstat(number)
    except (OSError, ValueError, AttributeError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Target("standard output", path=Path(os.path.realpath(f"/dev/fd/{number}")), found=status, descriptor=number)

"""Files that a command writes: whole, or not at all, and never over what it reads."""

from collections.abc import Iterable

from rolloutdoctor.cli.inputs import claim, refuse_inputs
from rolloutdoctor.io.locations.targets import Target, shown
from rolloutdoctor.io.write import replacing


def check_target(path: str | None, name: str = "", *, whole: str = "") -> None:
    """Refuse, before a long run is read, what could not be written at its end.

    Args:
        path: where a result will go; None: to standard output.
        name: what a message calls the file; empty: its path.
        whole: what it is, if that can only be written to a file.

    Raises:
        UsageError: if nothing can be written there, or the file is one that the command reads or writes already.
    """
    if path is not None:
        target = Target.of(path, _called(name, path))
        if whole:
            target.check_whole(whole)
        claim(target)


def write_whole(content: bytes | Iterable[bytes], path: str, name: str = "") -> None:
    """Write a file under a temporary name, then put it in place: nobody ever sees a part of it.

    A device, a pipe or an open file is written into; a link stays one, and its target is replaced.

    Args:
        content: of the file, at once or in pieces.
        path: where to.
        name: what a message calls the file before its path, such as ``--output-file``; empty: by its path alone.

    Raises:
        UsageError: if it cannot be written.
    """
    target = Target.of(path, _called(name, path))
    # Again: what it is may have changed while the run was read.
    refuse_inputs(target)
    replacing.write_whole(content, target)


def _called(name: str, path: str) -> str:
    return f"{name} {shown(path)}" if name else ""

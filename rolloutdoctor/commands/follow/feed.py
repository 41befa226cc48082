"""Feeds that are followed: something that grows, whose complete steps can be read."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rolloutdoctor.commands.follow.trail import Trail
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.errors import InputError


@dataclass(frozen=True)
class Fresh:
    """Steps that can be counted.

    Attributes:
        run: a run that holds all their rows, and perhaps rows of other steps.
        ready: the steps, in order.
    """

    run: Run
    ready: tuple[StepKey, ...]


class Feed(Protocol):
    """A run that grows.

    Attributes:
        name: what a message calls it.
        files: names of its files, as a check of the whole would name them.
        trail: what was logged.
        replaced: True if a file has been replaced since the last look, so that it may be another run.
        waits_for: why what is there cannot be read yet; empty if nothing waits.
    """

    name: str
    files: tuple[str, ...]
    trail: Trail
    replaced: bool
    waits_for: str

    def changed(self) -> bool:
        """Look at the files; True if anything is new since the last look.

        Raises:
            InputError: if a file is shorter than it was.
        """
        ...

    def fresh(self, counted: StepSpans, *, ended: bool) -> "AbstractContextManager[Fresh | None]":
        """Read steps that were not counted; None if there are none.

        Args:
            counted: the steps that were.
            ended: True if nothing more will come: every step is whole.

        Raises:
            InputError: if a file cannot be read, or has got rows of a step that was counted.
        """
        ...

    def rewind(self) -> None:
        """Begin at the start again: no step has been counted."""
        ...


def whole_steps(
    there: Iterable[StepKey], counted: StepSpans, *, begun: int, logged: int | None, ended: bool
) -> Iterator[StepKey]:
    """Yield the steps that are whole and not counted.

    A step is whole when a later one has begun, and its log is there: a trainer that logs every tenth step says at the
    tenth what the other nine belong to.

    Args:
        there: steps that have rows.
        counted: steps that were counted.
        begun: latest step that has begun in every series of files.
        logged: latest step at which training was logged; None if it never was.
        ended: True if nothing more will come.
    """
    for key in sorted(there):
        is_logged = logged is None or key.split != TRAIN or key.step <= logged
        if key not in counted and (ended or (key.step < begun and is_logged)):
            yield key


def late_rows(name: str, key: StepKey) -> InputError:
    """Return the error for rows of a step that was counted before they came."""
    return InputError(
        f"{name}: more {key.split} rows of step {key.step} have come after a later step had begun and it was counted; "
        "write all rows of a step before the next, or check the run once it is whole"
    )

"""Errors that users see, each with its exit code.

Every message is one sentence that names the file, the column and the row where it applies, what was
expected, and what to do. Errors are raised where data or options enter and caught once, in the command line.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class RolloutDoctorError(Exception):
    """Root of every error that this package raises on purpose."""

    exit_code = 2


class UsageError(RolloutDoctorError):
    """An option, a rule code, a fix or a trainer's setting is unknown, out of range or contradictory."""


class UnstatedError(UsageError):
    """An option that every verdict hangs on was not stated, and its default is too much to assume."""


class InputError(RolloutDoctorError):
    """A file or a path cannot be read as a run."""


class SeveralRunsError(InputError):
    """Error of an input given as one run that holds several: two trainers, sets of options, or values of one metric."""


class SchemaError(InputError):
    """A column is missing, or its type is not one that the column may have."""


class DataError(InputError):
    """A value in a row breaks the contract of its column."""


class BatchError(RolloutDoctorError):
    """A step does not hold together: lengths, offsets or indices disagree.

    The reader turns it into a `DataError` with the file and the row.

    Attributes:
        column: the column at fault, or None.
        row: index of the row inside the step, or None.
    """

    def __init__(self, message: str, *, column: str | None = None, row: int | None = None) -> None:
        super().__init__(message)
        self.column = column
        self.row = row


class DeviceError(RolloutDoctorError):
    """A GPU fails, or does not compute what the CPU computes, so nothing that it says is taken.

    Attributes:
        reason: the beginning of the sentence: what happened.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason}; nothing more was evaluated, use --device cpu"


class DeviceWarning(UserWarning):
    """Warning that the CPU computes what was begun on a GPU."""


TRAINER = "{trainer}"
"""In the message of a `CannotComputeError`: whoever fails on the step; a formula does not know who uses it."""


class CannotComputeError(RolloutDoctorError):
    """The trainer itself would fail on this step, so no number exists to be reported.

    Attributes:
        trainer: what `TRAINER` stands for in the message.
    """

    trainer = "the trainer"

    def __str__(self) -> str:
        return super().__str__().replace(TRAINER, self.trainer)


@contextmanager
def naming(trainer: str) -> Iterator[None]:
    """Name the trainer in a `CannotComputeError` that is raised inside."""
    try:
        yield
    except CannotComputeError as error:
        error.trainer = trainer
        raise


def nearest(word: str, candidates: "list[str] | tuple[str, ...]") -> str:
    """Return ``; did you mean 'x'?`` for the known word closest to `word`, or an empty string.

    >>> nearest("betta", ["beta", "epsilon"])
    "; did you mean 'beta'?"
    >>> nearest("TRL", ["trl", "verl"])
    "; did you mean 'trl'?"
    >>> nearest("zzz", ["beta"])
    ''
    """
    import difflib

    by_lower = {each.lower(): each for each in reversed(candidates)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""

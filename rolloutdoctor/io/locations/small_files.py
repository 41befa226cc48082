"""Small files that are read whole: of a bounded size, regular, and text."""

import os
import stat
from collections.abc import Mapping

from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.results.errors import RolloutDoctorError, UsageError

MOST_BYTES = 16 * 2**20
"""Of a file of options: thousands of times what a trainer writes."""

_LEAST_READ = 2**20

MOST_LEVELS = 64
MOST_OPTIONS = 100_000
LONGEST_NAME = 1000
"""Of an option, with the tables that it is in: each joins the names of all that it holds."""

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def read_small(
    path: "str | os.PathLike[str]",
    *,
    name: str = "",
    expected: str,
    most: int = MOST_BYTES,
    error: type[RolloutDoctorError] = UsageError,
) -> str:
    """Return the text of a file, without waiting for one that never ends.

    Args:
        path: of the file.
        name: how messages call it; empty: by its path.
        expected: what the user should give, the end of every message.
        most: bytes that are read at most.
        error: what is raised.

    Raises:
        RolloutDoctorError: an `error`, if it cannot be read, is too large, not a regular file, or not UTF-8 text.
    """
    content = read_small_bytes(path, name=name, expected=expected, most=most, error=error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{name or shown(path)}: not UTF-8 text; {expected}") from None


def read_small_bytes(
    path: "str | os.PathLike[str]",
    *,
    name: str = "",
    expected: str,
    most: int = MOST_BYTES,
    error: type[RolloutDoctorError] = UsageError,
) -> bytes:
    """Return what is in a file, as `read_small` does its text.

    Raises:
        RolloutDoctorError: an `error`, if it cannot be read, is too large, or not a regular file.
    """
    name = name or shown(path)
    try:
        _check_regular(os.stat(path), name, expected, error)  # noqa: PTH116 - keeps the name as given
        # It may have become a pipe since, which would be waited for.
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            _check_regular(status, name, expected, error)
            # Python makes room for all that it is asked for, whatever the file has. Some in /proc have no size.
            content = b"" if status.st_size > most else file.read(min(most, max(status.st_size, _LEAST_READ)) + 1)
        if max(status.st_size, len(content)) > most:
            raise error(f"{name}: larger than the {most // 2**20:,} MiB that are read of such a file; {expected}")
        return content
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or "not a path"
        raise error(f"{name}: {why}; {expected}") from None


def _check_regular(status: os.stat_result, name: str, expected: str, error: type[RolloutDoctorError]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for fits, words in _KINDS if fits(status.st_mode)), "a device")
        raise error(f"{name}: {kind} where a regular file was expected; {expected}")


def flat(table: Mapping[object, object], name: str) -> dict[str, object]:
    """Join the keys of nested tables with dots.

    >>> flat({"actor": {"kl_coef": 0.1}, "beta": 0}, "x.json")
    {'actor.kl_coef': 0.1, 'beta': 0}

    Args:
        table: of options.
        name: of the file, for messages.

    Raises:
        UsageError: if tables are nested too deeply, or there are too many options: aliases of YAML can make
            billions of a few lines.
    """
    values: dict[str, object] = {}
    waiting, count = [("", iter(table.items()))], 0
    while waiting:
        prefix, items = waiting[-1]
        for key, value in items:
            count += 1
            _check_value(key, name)
            if len(prefix) + len(str(key)) > LONGEST_NAME:
                raise UsageError(f"{name}: the name of an option is longer than {LONGEST_NAME:,} characters")
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}.", iter(value.items())))
                break
            _check_value(value, name)
            values[f"{prefix}{key}"] = value
        else:
            waiting.pop()
        if len(waiting) > MOST_LEVELS:
            raise _too_deep(name)
        if count > MOST_OPTIONS:
            raise UsageError(f"{name}: holds more than {MOST_OPTIONS:,} options; give the trainer's own file")
    return values


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object of JSON of its pairs; of a key that is there twice nobody can say which counts.

    Raises:
        ValueError: if one is.
    """
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is there twice")
    return table


def _check_value(value: object, name: str) -> None:
    """Whoever prints or compares a value goes down into it, by recursion."""
    count, waiting = 0, [(value, 1)]
    while waiting:
        node, level = waiting.pop()
        count += 1
        if level > MOST_LEVELS:
            raise _too_deep(name)
        if count > MOST_OPTIONS:
            raise UsageError(f"{name}: a value holds more than {MOST_OPTIONS:,} others; give the trainer's own file")
        if isinstance(node, int) and abs(node) >= 2**64:
            raise UsageError(f"{name}: a whole number beyond 64 bits; give the trainer's own file")
        if isinstance(node, Mapping):
            waiting += [(each, level + 1) for each in node.values()]
        elif isinstance(node, (list, tuple, set)):
            waiting += [(each, level + 1) for each in node]


def _too_deep(name: str) -> UsageError:
    return UsageError(f"{name}: nested more than {MOST_LEVELS} levels deep; give the trainer's own file")

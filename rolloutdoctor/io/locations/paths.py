"""From what the user typed to the run files and metrics tables that it means."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from rolloutdoctor.io.locations.stores import Address, address_of, is_there, listing
from rolloutdoctor.results.errors import InputError, UsageError

METRIC_SUFFIXES = (".metrics.parquet", ".metrics.jsonl")
JOURNAL_SUFFIX = ".journal"

_MAGIC = re.compile(r"[*?\[]")
_TEMPORARY = re.compile(r"\.tmp\b")
_JOURNAL = re.compile(r"(?P<run>.*?)(\.[0-9]+)?\.journal", re.DOTALL)


_called: dict[str, str] = {}


IN_MEMORY = "rows in memory"
"""What rows that came from no file are called, in messages and results."""


@contextmanager
def call(path: str, name: str) -> Iterator[None]:
    """Call a path by a name that the user knows, in all messages, until the block ends."""
    _called[path] = name
    try:
        yield
    finally:
        del _called[path]


@dataclass(frozen=True)
class Source:
    """One file to read.

    Attributes:
        path: what to open, an address perhaps.
        name: how to call it in messages and results: built from what the user gave, never made absolute.
    """

    path: str
    name: str

    @classmethod
    def of(cls, path: str) -> "Source":
        """Name a path after itself; bytes that are not UTF-8 are shown escaped, so that the name can be printed.

        An address is named without what may be a secret in it.
        """
        address = address_of(path)
        if address is not None:
            return cls(path, address.name)
        if path in _called:
            return cls(path, _called[path])
        return cls(path, os.fsencode(path).decode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class RunPaths:
    """The files of a run, in reading order, the tables of logged metrics beside them, and recordings not closed."""

    files: tuple[Source, ...]
    metrics: tuple[Source, ...]
    journals: tuple[Source, ...] = ()


def expand(paths: Sequence[str | os.PathLike[str]]) -> RunPaths:
    """Find the run files: files as given, the `*.parquet` of a directory, and the files that a glob matches.

    Arguments keep their order; inside a directory or a glob the order is natural (``part-2`` before ``part-10``).
    A file that is reached twice is read once. Hidden and temporary names are left out unless given by name.
    ``**`` does not follow links to directories. Metrics tables (`*.metrics.parquet`, `*.metrics.jsonl`) are never
    run files: they are taken beside each run file, from each directory given, and where given by name. A journal in a
    directory or a pattern counts where its run file is not there.

    Addresses (``s3://``, ``gs://``, ``hf://``, ``https://``) are taken in the same way, except that a pattern may only
    be in the last part, and that the web knows files alone.

    Raises:
        InputError: if a path does not exist, cannot be reached, or holds no run file.
        UsageError: if a pattern is malformed.
    """
    if not paths:
        raise InputError("no run file was given; name a Parquet file, a directory or a pattern")
    files: list[str] = []
    metrics: list[str] = []
    journals: list[str] = []
    for path in map(os.fsdecode, paths):
        expanded = list(_expand_one(path))
        metrics += filter(_is_metrics, expanded)
        journals += [path for path in expanded if is_journal_name(path)]
        runs = [path for path in expanded if not _is_metrics(path) and not is_journal_name(path)]
        metrics += [path for run in runs for path in _metrics_beside(run)]
        files += runs
    if not files and not journals:
        raise InputError(f"{_distinct(metrics)[0].name}: logged metrics, not rollouts; give the run file as well")
    return RunPaths(_distinct(files), _distinct(metrics), _distinct(journals))


def is_journal_name(path: str) -> bool:
    """Tell the journal of a recording that was not closed by its name."""
    return path.endswith(JOURNAL_SUFFIX) and address_of(path) is None


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that reads runs of digits as numbers.

    >>> sorted(["part-10", "part-9", "part-x"], key=natural_key)
    ['part-9', 'part-10', 'part-x']
    """
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]


def reason(error: OSError) -> str:
    """Say why a file could not be opened, without the path that the operating system's message repeats."""
    if isinstance(error, FileNotFoundError):
        return "no such file or directory; check the path"
    if isinstance(error, PermissionError):
        return "permission denied; make the file and its directories readable"
    words = error.strerror or " ".join(str(error).split()) or type(error).__name__
    return f"cannot be read ({words[:1].lower() + words[1:]}); check the path"


def _expand_one(path: str) -> Iterator[str]:
    name = Source.of(path).name
    address = address_of(path)
    if address is not None:
        yield from _expand_address(path, address)
        return
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a Path would rewrite the name that the user gave
    except FileNotFoundError:
        if not _MAGIC.search(path):
            raise InputError(f"{name}: no such file or directory; {_instead(path, name)}") from None
        yield from _expand_glob(path, name)
        return
    except OSError as error:
        raise InputError(f"{name}: {reason(error)}") from None
    except ValueError:
        raise InputError(f"{name!r}: not a path; it holds a null character") from None
    if stat.S_ISDIR(mode):
        yield from _expand_directory(path, name)
    elif stat.S_ISREG(mode):
        yield path
    else:
        raise InputError(f"{name}: neither a file nor a directory; a run has to be a regular Parquet file")


def _instead(path: str, name: str) -> str:
    if os.path.isfile(f"{path}.journal"):  # noqa: PTH113 - keeps the name as given
        return f"a recording that was not closed lies there: give {name}.journal"
    return "check the path"


def _expand_directory(path: str, name: str) -> Iterator[str]:
    try:
        names = sorted((entry for entry in os.listdir(path) if not _is_passing(entry)), key=natural_key)  # noqa: PTH208
    except OSError as error:
        raise InputError(f"{name}: {reason(error)}") from None
    paths = [os.path.join(path, entry) for entry in names]  # noqa: PTH118 - keeps the name as given
    # Somebody would wait for a pipe.
    paths = list(filter(os.path.isfile, paths))
    runs = with_journals([path for path in paths if path.endswith(".parquet") and not _is_metrics(path)], paths)
    if not runs:
        if not names:
            raise InputError(f"{name}: the directory is empty; check the path")
        raise InputError(
            f"{name}: the directory holds no run file (*.parquet), and no dump or log that is known; give the files or "
            "a pattern such as **"
        )
    yield from runs
    yield from filter(_is_metrics, paths)


def with_journals(runs: list[str], paths: Iterable[str]) -> list[str]:
    """Add the journals whose run files are not there: of the ranks that were killed."""
    by_run: dict[str, str] = {}
    for path in filter(is_journal_name, paths):
        match = _JOURNAL.fullmatch(path)
        run = match["run"] if match else path
        if os.path.exists(run):  # noqa: PTH110 - keeps the name as given
            continue
        if run in by_run:
            raise InputError(
                f"{Source.of(by_run[run]).name} and {Source.of(path).name}: two recordings that were not closed, of "
                "one name; give one of them"
            )
        by_run[run] = path
    return sorted([*runs, *by_run.values()], key=natural_key)


def matching(pattern: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what a pattern matches: paths as the pattern begins, and the parts of each behind that.

    ``**`` follows no link to a folder: there may be as many ways as there are names of forty letters.

    Raises:
        ValueError: if the pattern cannot be matched.
        OSError: if a folder cannot be read.
    """
    parts = pattern.split("/")
    first = next(index for index, part in enumerate(parts) if _MAGIC.search(part))
    prefix = "/".join(parts[:first]) + "/" if first else ""
    root = Path(prefix or ".")
    magic = [part for part in parts[first:] if part]
    if magic[-1] == "**":
        # By itself it matches directories only.
        magic.append("*")
    for match in root.glob("/".join(magic)):
        below = match.relative_to(root)
        yield f"{prefix}{below}", below.parts


def _expand_glob(pattern: str, name: str) -> Iterator[str]:
    try:
        matches = [(path, parts) for path, parts in matching(pattern) if os.path.isfile(path)]  # noqa: PTH113
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{name}: not a pattern that can be matched ({error}); '**' has to stand alone") from None
    except OSError as error:
        raise InputError(f"{name}: {reason(error)}") from None
    files = [path for path, parts in matches if not any(map(_is_passing, parts)) and not _is_metrics(parts[-1])]
    # A pattern such as runs/* also matches notes beside the run.
    parquet = with_journals([path for path in files if path.endswith(".parquet")], files)
    if not files:
        raise InputError(f"{name}: no file matches the pattern; check it, and quote it if the shell expands it")
    yield from parquet or sorted((path for path in files if not is_journal_name(path)), key=natural_key)


def _expand_address(path: str, address: Address) -> Iterator[str]:
    folder, _, last = address.path.rpartition("/")
    is_pattern = "*" in address.path or "[" in address.path
    if is_pattern and (address.scheme in ("http", "https") or "*" in folder or "[" in folder):
        raise UsageError(f"{address.name}: a pattern can only be in the last part of an s3://, gs:// or hf:// address")
    paths = listing(address._replace(path=folder) if is_pattern else address)
    if paths is None:
        yield path
        return
    names = {path.rpartition("/")[2]: path for path in paths}
    chosen = [name for name in sorted(names, key=natural_key) if not _is_passing(name)]
    if is_pattern:
        chosen = [name for name in chosen if fnmatchcase(name, last) and not _is_metrics(name)]
        chosen = [name for name in chosen if name.endswith(".parquet")] or chosen
    else:
        chosen = [name for name in chosen if name.endswith(".parquet") or _is_metrics(name)]
    if all(map(_is_metrics, chosen)):
        advice = "no file matches the pattern; check it" if is_pattern else "there is no run file (*.parquet); check it"
        raise InputError(f"{address.name}: {advice}")
    yield from (address.with_path(names[name]) for name in chosen)


def _metrics_beside(run: str) -> Iterator[str]:
    address = address_of(run)
    if address is not None:
        stem = address.path.removesuffix(".parquet")
        yield from filter(is_there, (address.with_path(stem + suffix) for suffix in METRIC_SUFFIXES))
        return
    stem = run.removesuffix(".parquet")
    for path in (stem + suffix for suffix in METRIC_SUFFIXES):
        if Path(path).is_file():
            yield path


def _is_metrics(path: str) -> bool:
    address = address_of(path)
    return (path if address is None else address.path).endswith(METRIC_SUFFIXES)


def _is_passing(name: str) -> bool:
    """Tell names that are hidden, or that a writer uses before it is done."""
    return name.startswith((".", "_")) or name.endswith("~") or _TEMPORARY.search(name) is not None


def _distinct(paths: Iterable[str]) -> tuple[Source, ...]:
    distinct: dict[str, str] = {}
    for path in paths:
        distinct.setdefault(os.path.realpath(path) if address_of(path) is None else path, path)
    return tuple(map(Source.of, distinct.values()))

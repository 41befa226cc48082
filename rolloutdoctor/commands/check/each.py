"""Several runs: find them in folders and patterns, and check one after the other."""

import os
import re
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.importers.logs.table import kind_of, runs_of
from rolloutdoctor.io.locations.paths import Source, expand, is_journal_name, matching, natural_key, with_journals
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.parquet.files import RunFile, read_footer
from rolloutdoctor.io.parquet.index import build_index
from rolloutdoctor.io.run import Run
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.opening.logs import are_apart, is_of_evaluations, logs_of, read_logs
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, SeveralRunsError, UsageError
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.trainers.table import ALIASES

Opening = Callable[[list[str]], AbstractContextManager[Run]]

Found = TypeVar("Found")

_MAGIC = frozenset("*?[")
_RANK = re.compile(r"\.rank[0-9]+\.parquet(\.[0-9]+)?(\.journal)?$")


@dataclass(frozen=True)
class NamedRun:
    """Files of one run.

    Attributes:
        name: what to call it.
        paths: its files, dump or log.
    """

    name: str
    paths: tuple[str, ...]


def find_runs(paths: Sequence[str], *, as_dump: bool = False) -> list[NamedRun]:
    """Find the runs that paths name, in natural order.

    Files of one folder are one run if they say the same of themselves, and either each holds other ranks or each holds
    other steps; a file that says nothing is a run of its own. A dump is one run by its folder, and so are logs without
    rollouts, unless they contradict each other. Folders are searched to any depth.

    Args:
        paths: as the user gave them.
        as_dump: every path is a dump, whatever it looks like.

    Raises:
        InputError: if nothing is found.
    """
    runs: list[NamedRun] = []
    for path in paths:
        path_runs = [NamedRun(Source.of(path).name, (path,))] if as_dump else list(_found(path))
        if not path_runs:
            raise InputError(f"{Source.of(path).name}: no run was found there (*.parquet, a dump, or a log)")
        runs += path_runs
    distinct = {each.paths: each for each in runs}
    return list(distinct.values())


def _found(path: str) -> Iterator[NamedRun]:
    if address_of(path) is not None:
        yield from _by_what_they_say([source.path for source in expand([path]).files])
        return
    if not os.path.lexists(path) and _MAGIC & set(path):
        yield from _of_pattern(path)
        return
    if Path(path).is_dir():
        yield from _of_folder(path)
        return
    yield from _of_file(path)


def _of_file(file_path: str) -> Iterator[NamedRun]:
    """Return the runs in a file."""
    runs = _quietly(lambda: runs_of(Path(file_path))) or ()
    for path in [f"{file_path}/{run}" for run in runs] if len(runs) > 1 else [file_path]:
        yield NamedRun(Source.of(path).name, (path,))


def _of_pattern(pattern: str) -> Iterator[NamedRun]:
    files: dict[str, list[str]] = {}
    try:
        matches = [path for path, parts in matching(pattern) if not any(part.startswith(".") for part in parts)]
    except (ValueError, NotImplementedError) as error:
        raise UsageError(f"{Source.of(pattern).name}: not a pattern that can be matched ({error})") from None
    for match in sorted(matches, key=natural_key):
        if Path(match).is_dir():
            if "**" not in pattern:
                yield from _of_folder(match)
        elif _is_run_file(match) or is_journal_name(match):
            files.setdefault(str(Path(match).parent), []).append(match)
        elif not match.endswith((".metrics.parquet", ".metrics.jsonl")):
            yield from _of_file(match)
    for inside in files.values():
        yield from _by_what_they_say(with_journals(list(filter(_is_run_file, inside)), inside))


def _of_folder(root: str) -> Iterator[NamedRun]:
    """Find the runs in a folder and below; each folder once, however many links lead to it."""
    waiting, visited = [root], set[str]()
    while waiting:
        folder = waiting.pop()
        place = os.path.realpath(folder)
        if place not in visited:
            visited.add(place)
            runs, below = _of_one_folder(folder)
            yield from runs
            # A folder in the one that is searched, as wandb/latest-run, has a name there.
            waiting += [path for path in reversed(below) if not (Path(path).is_symlink() and _is_below(path, root))]


def _is_below(link: str, root: str) -> bool:
    place = Path(os.path.realpath(link))
    top = os.path.realpath(root)
    return place.is_relative_to(top) and not any(map(_is_hidden, place.relative_to(top).parts))


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def _of_one_folder(folder: str) -> tuple[list[NamedRun], list[str]]:
    """Return the runs that lie in a folder, and the folders in it that may hold others, in natural order."""
    name = Source.of(folder).name
    if _quietly(lambda: detect_dump([folder], ConvertOptions())) is not None:
        return [NamedRun(name, (folder,))], []
    is_log = kind_of(Path(folder)) is not None
    if is_log and not _is_of_several(folder):
        # What lies below, such as the console of a wandb run, is of the same run.
        return [NamedRun(name, (folder,))], []
    entries = sorted((each for each in os.listdir(folder) if not _is_hidden(each)), key=natural_key)  # noqa: PTH208
    paths = [os.path.join(folder, each) for each in entries]  # noqa: PTH118 - keeps the name as given
    files = [path for path in paths if _is_run_file(path) and Path(path).is_file()]
    files = with_journals(files, filter(os.path.isfile, paths))
    runs = list(_by_what_they_say(files))
    if not files and not is_log:
        logs = _quietly(lambda: logs_of([folder])) or ()
        by_values = list(_by_values([log.path for log in logs]))
        runs += [NamedRun(name, (folder,))] if len(by_values) == 1 else by_values
        if logs and Path(logs[0].path).parent != Path(folder):
            # The checkpoints below are of this run.
            return runs, []
    return runs, list(filter(os.path.isdir, paths))


def _is_of_several(folder: str) -> bool:
    try:
        read_logs([Source.of(folder)])
    except SeveralRunsError:
        return True
    except RolloutDoctorError:
        return False
    return False


def _by_values(logs: Sequence[str]) -> Iterator[NamedRun]:
    """Put logs together that are of one run: of one trainer, and with one value of each metric at a step.

    A file of evaluations beside a single training is of that.
    """
    runs: list[list[tuple[str, LoggedMetrics | None]]] = []
    for path in sorted(logs, key=is_of_evaluations):
        table = _quietly(partial(read_logs, [Source.of(path)]))
        if (table is None or table.facts.others) and len(inside := list(_of_file(path))) > 1:
            yield from inside
            continue
        of_one = (run for run in runs if table and all(other and not are_apart(other, table) for _, other in run))
        is_beside = len(runs) == 1 and is_of_evaluations(path) and not is_of_evaluations(runs[0][0][0])
        mine = runs[0] if is_beside else next(of_one, None)
        if mine is None:
            runs.append([(path, table)])
        else:
            mine.append((path, table))
    for run in runs:
        more = f" and {len(run) - 1:,} more" if len(run) > 1 else ""
        yield NamedRun(f"{Source.of(run[0][0]).name}{more}", tuple(path for path, _ in run))


def _quietly(look: Callable[[], Found]) -> Found | None:
    try:
        return look() or None
    except RolloutDoctorError:
        return None


def _is_run_file(path: str) -> bool:
    return path.endswith(".parquet") and not path.endswith(".metrics.parquet") and kind_of(Path(path)) is None


@dataclass
class _Parts:
    """Files of one run, in the order in which they were added.

    Attributes:
        first: what the first file says of the run; None if nobody can say whether another file is of this run.
        paths: of the files.
        ranks: in the names of files, as a recorder gives them to the file of each process.
        spans: first and last step of each file, in order.
        unranked: the same, of files without a rank.
    """

    first: RunFile | None
    paths: list[str]
    ranks: set[str] = field(default_factory=set)
    spans: list[tuple[int, int]] = field(default_factory=list)
    unranked: list[tuple[int, int]] = field(default_factory=list)

    def takes(self, file: RunFile, rank: str | None, span: tuple[int, int] | None) -> bool:
        """Add a file if it says the same as the others, and holds another rank or other steps than each of them."""
        if self.first is None or _said(self.first) != _said(file) or rank in self.ranks:
            return False
        others = self.spans if rank is None else self.unranked
        count = len(self.paths) if rank is None else len(self.paths) - len(self.ranks)
        # Of a file with unknown steps nobody can say that they are others.
        if count and (span is None or len(others) < count or not _fits(span, others)):
            return False
        self.add(file, rank, span)
        return True

    def add(self, file: RunFile, rank: str | None, span: tuple[int, int] | None) -> None:
        """Add a file."""
        self.paths.append(file.source.path)
        self.ranks |= set() if rank is None else {rank}
        if span is not None:
            insort(self.spans, span)
            if rank is None:
                insort(self.unranked, span)


def _fits(span: tuple[int, int], others: Sequence[tuple[int, int]]) -> bool:
    """Tell whether steps are others than those of files in order; a step may end one file and begin the next."""
    at = bisect(others, span)
    ordered = [*others[max(at - 1, 0) : at], span, *others[at : at + 1]]
    return all(high <= begin and (low, high) != (begin, end) for (low, high), (begin, end) in pairwise(ordered))


def _by_what_they_say(paths: Sequence[str]) -> Iterator[NamedRun]:
    """Put files together that are of one run."""
    runs: list[_Parts] = []
    alike: dict[object, list[_Parts]] = {}
    by_stem: dict[str, _Parts] = {}
    for path in sorted(paths, key=is_journal_name):
        stem = _RANK.sub("", path)
        if is_journal_name(path) and stem in by_stem:
            by_stem[stem].paths.append(path)
            continue
        file = None if is_journal_name(path) else _footer(path)
        if file is None or file.metadata == RunMetadata():
            # One that cannot be read gets a line of its own, which says what is wrong.
            runs.append(_Parts(None, [path]))
        else:
            rank, span = _rank(file), _steps(file)
            key = file.metadata.trainer, file.metadata.trainer_version, frozenset(file.metadata.config)
            candidates = alike.setdefault(key, [])
            if any(run.takes(file, rank, span) for run in candidates):
                continue
            runs.append(_Parts(file, []))
            runs[-1].add(file, rank, span)
            candidates.append(runs[-1])
        by_stem.setdefault(stem, runs[-1])
    for run in runs:
        first = Source.of(run.paths[0]).name
        more = f" and {len(run.paths) - 1:,} more" if len(run.paths) > 1 else ""
        yield NamedRun(f"{first}{more}", tuple(run.paths))


def _footer(path: str) -> RunFile | None:
    try:
        return read_footer(Source.of(path), None, ALIASES)
    except RolloutDoctorError:
        return None


def _said(file: RunFile) -> tuple[object, ...]:
    metadata = file.metadata
    return metadata.trainer, metadata.trainer_version, dict(metadata.config)


def _rank(file: RunFile) -> str | None:
    """The rank in the name that a recorder gives to the file of each process."""
    match = re.search(r"\.rank([0-9]+)\.parquet$", file.name)
    return match[1] if match else None


def _steps(file: RunFile) -> tuple[int, int] | None:
    try:
        groups = build_index([file])
    except RolloutDoctorError:
        return None
    if not groups:
        return None
    return min(group.low for group in groups), max(group.high for group in groups)


def check_each(runs: Sequence[NamedRun], opening: Opening, options: CheckOptions) -> Iterator[CheckedRun]:
    """Check one run after the other; one that cannot be read, or checked, does not stop the others."""
    for each in runs:
        # No reference to a report may be left in this frame while the next run is checked.
        yield _checked(each, opening, options)


def _checked(named: NamedRun, opening: Opening, options: CheckOptions) -> CheckedRun:
    try:
        with opening(list(named.paths)) as run:
            return CheckedRun(named.name, named.paths, check(run, options))
    except RolloutDoctorError as error:
        return CheckedRun(named.name, named.paths, None, str(error))

"""Several runs: find them in folders and patterns, and check one after the other."""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rolloutdoctor.commands.check import check
from rolloutdoctor.commands.convert import ConvertOptions, are_apart, detect_dump, logs_of, read_logs
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.importers.logs.trackio_project import trackio_runs
from rolloutdoctor.io.locations.paths import Source, expand, is_journal_name, natural_key, with_journals
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.parquet.files import RunFile, read_footer
from rolloutdoctor.io.parquet.index import build_index
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, SeveralRunsError
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
    found: list[NamedRun] = []
    for given in paths:
        here = [NamedRun(Source.of(given).name, (given,))] if as_dump else list(_found(given))
        if not here:
            raise InputError(f"{Source.of(given).name}: no run was found there (*.parquet, a dump, or a log)")
        found += here
    distinct = {each.paths: each for each in found}
    return list(distinct.values())


def _found(given: str) -> Iterator[NamedRun]:
    if address_of(given) is not None:
        yield from _by_what_they_say([source.path for source in expand([given]).files])
        return
    if not os.path.lexists(given) and _MAGIC & set(given):
        yield from _of_pattern(given)
        return
    if Path(given).is_dir():
        yield from _of_folder(given)
        return
    runs = _quietly(lambda: trackio_runs(Path(given))) or ()
    for path in [f"{given}/{run}" for run in runs] if len(runs) > 1 else [given]:
        yield NamedRun(Source.of(path).name, (path,))


def _of_pattern(pattern: str) -> Iterator[NamedRun]:
    files: dict[str, list[str]] = {}
    matches = sorted(glob.glob(pattern, recursive=True), key=natural_key)  # noqa: PTH207 - keeps the name as given
    for match in matches:
        if Path(match).is_dir():
            if "**" not in pattern:
                yield from _of_folder(match)
        elif _is_run_file(match) or is_journal_name(match):
            files.setdefault(str(Path(match).parent), []).append(match)
        elif not match.endswith((".metrics.parquet", ".metrics.jsonl")):
            yield NamedRun(Source.of(match).name, (match,))
    for inside in files.values():
        yield from _by_what_they_say(with_journals(list(filter(_is_run_file, inside)), inside))


def _of_folder(folder: str) -> Iterator[NamedRun]:
    name = Source.of(folder).name
    if _quietly(lambda: detect_dump([folder], ConvertOptions())) is not None:
        yield NamedRun(name, (folder,))
        return
    is_log = kind_of(Path(folder)) is not None
    if is_log and not _is_of_several(folder):
        # What lies below, such as the console of a wandb run, is of the same run.
        yield NamedRun(name, (folder,))
        return
    entries = sorted((each for each in os.listdir(folder) if not each.startswith((".", "_"))), key=natural_key)  # noqa: PTH208
    paths = [os.path.join(folder, each) for each in entries]  # noqa: PTH118 - keeps the name as given
    files = [path for path in paths if _is_run_file(path) and Path(path).is_file()]
    files = with_journals(files, filter(os.path.isfile, paths))
    yield from _by_what_they_say(files)
    if not files and not is_log:
        logs = _quietly(lambda: logs_of([folder])) or ()
        found = list(_by_values([log.path for log in logs]))
        yield from [NamedRun(name, (folder,))] if len(found) == 1 else found
        if logs and Path(logs[0].path).parent != Path(folder):
            # The checkpoints below are of this run.
            return
    # wandb/latest-run is another name for a folder beside it.
    folders = sorted(filter(os.path.isdir, paths), key=os.path.islink, reverse=True)
    for path in sorted({os.path.realpath(path): path for path in folders}.values(), key=natural_key):
        yield from _of_folder(path)


def _is_of_several(folder: str) -> bool:
    try:
        read_logs([Source.of(folder)])
    except SeveralRunsError:
        return True
    except RolloutDoctorError:
        return False
    return False


def _by_values(logs: Sequence[str]) -> Iterator[NamedRun]:
    """Put logs together that are of one run: of one trainer, and with one value of each metric at a step."""
    runs: list[list[tuple[str, LoggedMetrics | None]]] = []
    for path in logs:
        table = _quietly(partial(read_logs, [Source.of(path)]))
        of_one = (run for run in runs if table and all(other and not are_apart(other, table) for _, other in run))
        mine = next(of_one, None)
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


def _by_what_they_say(paths: Sequence[str]) -> Iterator[NamedRun]:
    """Put files together that are of one run."""
    runs: list[list[tuple[str, RunFile | None]]] = []
    for path in sorted(paths, key=is_journal_name):
        if is_journal_name(path):
            ranks = next((run for run in runs if _RANK.sub("", run[0][0]) == _RANK.sub("", path)), None)
            runs += [[(path, None)]] if ranks is None else []
            if ranks is not None:
                ranks.append((path, None))
            continue
        try:
            file = read_footer(Source.of(path), None, ALIASES)
        except RolloutDoctorError:
            # It gets a line of its own, which says what is wrong.
            runs.append([(path, None)])
            continue
        mine = next((run for run in runs if all(_is_one_run(other, file) for _, other in run)), None)
        if mine is None:
            runs.append([(path, file)])
        else:
            mine.append((path, file))
    for run in runs:
        first = Source.of(run[0][0]).name
        more = f" and {len(run) - 1:,} more" if len(run) > 1 else ""
        yield NamedRun(f"{first}{more}", tuple(path for path, _ in run))


def _is_one_run(one: RunFile | None, other: RunFile) -> bool:
    """Tell whether two files of one folder say the same, and hold other ranks or other steps of it."""
    if one is None or one.metadata == RunMetadata() or _said(one) != _said(other):
        return False
    ranks = [_ranks(file) for file in (one, other)]
    if ranks[0] is not None and ranks[1] is not None:
        return ranks[0] != ranks[1]
    steps = [_steps(file) for file in (one, other)]
    if steps[0] is None or steps[1] is None:
        return False
    (low, high), (begin, end) = sorted((steps[0], steps[1]))
    # The rows of the step at which a file ends may go on in the next one.
    return high < begin or (high == begin and (low, high) != (begin, end))


def _said(file: RunFile) -> tuple[object, ...]:
    said = file.metadata
    return said.trainer, said.trainer_version, dict(said.config)


def _ranks(file: RunFile) -> str | None:
    """The rank in the name that a recorder gives to the file of each process."""
    found = re.search(r"\.rank([0-9]+)\.parquet$", file.name)
    return found[1] if found else None


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


def _checked(found: NamedRun, opening: Opening, options: CheckOptions) -> CheckedRun:
    try:
        with opening(list(found.paths)) as run:
            return CheckedRun(found.name, found.paths, check(run, options))
    except RolloutDoctorError as error:
        return CheckedRun(found.name, found.paths, None, str(error))

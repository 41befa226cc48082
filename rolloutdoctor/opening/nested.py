"""Look into folders: those that hold a run further down (OUTPUT/wandb, LOGDIR/rollout), and those that are shut."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.importers.table import detect
from rolloutdoctor.io.locations.paths import METRIC_SUFFIXES, Source, natural_key, reason
from rolloutdoctor.results.errors import InputError, SeveralRunsError

_DEEPEST = 2
_MOST_FOLDERS = 1_000


def with_nested(
    paths: Sequence[str],
    is_run: Callable[[str], bool],
    tell: Callable[[str], None],
    are_of_one: Callable[[Sequence[Path]], bool] = lambda folders: False,
) -> list[str]:
    """Return paths with what lies in a folder that is no run itself, up to two levels down, in its place.

    Args:
        paths: as the user gave them.
        is_run: tells a path that can be read as it is.
        tell: takes a sentence on what is read.
        are_of_one: tells folders side by side that are of one run.

    Raises:
        SeveralRunsError: if a folder holds several runs side by side.
    """
    placed: list[str] = []
    for path in paths:
        inside = [] if not Path(path).is_dir() or is_run(path) else _nearest(Path(path))
        for parent in dict.fromkeys(folder.parent for folder in inside):
            siblings = [folder for folder in inside if folder.parent == parent]
            if len(siblings) > 1 and not are_of_one(siblings):
                name = Source.of(path).name
                shown = ", ".join(str(folder.relative_to(path)) for folder in siblings[:3])
                more = ", ..." if len(siblings) > 3 else ""
                raise SeveralRunsError(
                    f"{name}: {len(siblings)} runs ({shown}{more}); give the folder of one, or check them with --each"
                )
        placed += [str(folder) for folder in inside] or [path]
        if inside:
            tell(f"{Source.of(path).name}: read is {' and '.join(str(each.relative_to(path)) for each in inside)}")
    return placed


def _nearest(folder: Path) -> list[Path]:
    """The folders of runs that are nearest: all of one level."""
    level, visited = [folder], {os.path.realpath(folder)}
    for _ in range(_DEEPEST):
        level = [below for each in level for below in _folders(each, visited)]
        if runs := [each for each in level if holds_run(each)]:
            # Evaluations beside a training are no second run.
            return [each for each in runs if not each.name.startswith("eval")] or runs
    return []


def _folders(folder: Path, visited: set[str]) -> Iterator[Path]:
    try:
        entries = sorted(
            (entry for entry in folder.iterdir() if entry.is_dir()), key=lambda each: natural_key(each.name)
        )
    except OSError:
        return
    # wandb/latest-run is another name for a folder beside it.
    for entry in sorted(entries, key=Path.is_symlink):
        real = os.path.realpath(entry)
        if not entry.name.startswith((".", "checkpoint-")) and real not in visited and len(visited) < _MOST_FOLDERS:
            visited.add(real)
            yield entry


def holds_run(folder: Path) -> bool:
    """Tell a folder that is a dump or a log, or holds a log or a run file."""
    if kind_of(folder) is not None or detect(folder) is not None:
        return True
    try:
        files = [entry for entry in folder.iterdir() if entry.is_file()][:_MOST_FOLDERS]
    except OSError:
        return False
    return any(
        file.suffix == ".parquet" or file.name.endswith(METRIC_SUFFIXES) or kind_of(file) is not None for file in files
    )


@contextmanager
def looking(paths: Sequence[str]) -> Iterator[None]:
    """Turn what cannot be looked at, a folder that is shut, into one sentence."""
    try:
        yield
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else paths[0]
        raise InputError(f"{Source.of(where).name}: {reason(error)}") from None

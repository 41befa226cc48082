"""The files of a dump, by the names under which the user knows them."""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rolloutdoctor.io.locations.paths import Source, natural_key


def listed(folder: Path, is_wanted: Callable[[Path], object]) -> list[Path]:
    """The files in a folder that are wanted, in the natural order of their names; none if it cannot be read."""
    try:
        entries = [entry for entry in folder.iterdir() if is_wanted(entry) and entry.is_file()]
    except OSError:
        return []
    return sorted(entries, key=lambda entry: natural_key(entry.name))


def named(sources: Iterable[Source], find: Callable[[Path], Sequence[Path]]) -> list[Source]:
    """Every source that is a file, and in place of a folder what `find` makes of it, named as the folder was.

    A file that is reached twice, as by a link called latest, is there once.
    """
    listed_sources: list[Source] = []
    for source in sources:
        root = Path(source.path)
        if root.is_file():
            listed_sources.append(source)
        else:
            name = source.name.rstrip("/")
            listed_sources += [Source(str(file), f"{name}/{file.relative_to(root)}") for file in find(root)]
    distinct: dict[str, Source] = {}
    for file in listed_sources:
        distinct.setdefault(os.path.realpath(file.path), file)
    return list(distinct.values())

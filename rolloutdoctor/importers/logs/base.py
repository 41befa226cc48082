"""Interface of readers of logged numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Cell
from rolloutdoctor.io.locations.paths import Source

Entry = tuple[int, str, Mapping[str, Cell]]
"""Step, split, and value by name."""


class LogFormat(Protocol):
    """One way in which programs write logged numbers. The docstring names the upstream function that writes them."""

    def detect(self, path: Path) -> str | None:
        """Say what `path`, a file or a folder, is; None if it is not of this format. Reads little, and not the name."""
        ...

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what was logged, in file order; `notes` takes what was assumed, and the length of the run.

        Raises:
            InputError: if it is not what it looks like.
        """
        ...

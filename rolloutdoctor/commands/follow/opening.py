"""Find out what is to be followed, which may not be there yet, and what takes its place when it ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolloutdoctor.commands.follow.dumps import DumpFeed
from rolloutdoctor.commands.follow.feed import Feed
from rolloutdoctor.commands.follow.journals import JournalFeed
from rolloutdoctor.commands.follow.logs import LogFeed
from rolloutdoctor.commands.follow.run_files import RunFilesFeed
from rolloutdoctor.importers.journal import RecordingJournal
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.importers.table import detect
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.run import Run
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError

_JOURNAL = ".journal"


class Followed:
    """The paths that the user gave, and what is there now: nothing, a recording that goes on, files, a dump.

    Args:
        paths: as the user gave them.
        trainer: who wrote the files, or None: as they say.
        options: how to read a dump.
        tell: called with sentences for the user.
    """

    def __init__(
        self, paths: Sequence[str], trainer: str | None, options: ConvertOptions, tell: Callable[[str], None]
    ) -> None:
        self._paths, self._trainer, self._options, self._tell = list(paths), trainer, options, tell
        self.name = " ".join(Source.of(path).name for path in paths)

    def feed(self, before: Feed | None) -> Feed | None:
        """Return what can be followed now; None if nothing is there yet.

        Raises:
            InputError: if what is there is of different kinds.
        """
        if before is not None and not (isinstance(before, JournalFeed) and before.is_closed):
            return before
        paths = self._now()
        if paths is None:
            return before
        kinds = [None if detect(Path(path)) else kind_of(Path(path)) for path in paths]
        if kinds[0] is not None and None not in kinds and not self._options.asked_for:
            self._tell(f"follows logged metrics without rollouts ({kinds[0]})")
            return LogFeed(paths, self._options, self._trainer)
        dump = detect_dump(paths, self._options) if all(Path(path).exists() for path in paths) else None
        if dump is None:
            is_closed = before is not None
            if not is_closed and not _any_run_file(paths):
                return None
            return RunFilesFeed(paths, self._trainer, is_whole=is_closed)
        self._tell(f"follows with the importer {dump.importer.name}: {dump.why}")
        if dump.importer.name == RecordingJournal.name:
            return JournalFeed(dump.sources, self._trainer)
        return DumpFeed(dump, paths, self._options, self._trainer)

    def _now(self) -> list[str] | None:
        """The paths as they are now: a recording that was closed is a run file, one that goes on a journal."""
        paths = []
        for name in self._paths:
            path = Path(name)
            if path.is_dir() and not any(path.glob("*.parquet")):
                journals = sorted(str(each) for each in path.glob(f"*{_JOURNAL}"))
                paths += journals or [name]
            elif name.endswith(_JOURNAL) and not path.exists():
                paths.append(name.removesuffix(_JOURNAL))
            elif not path.exists() and Path(name + _JOURNAL).exists():
                paths.append(name + _JOURNAL)
            else:
                paths.append(name)
        return paths or None

    @contextmanager
    def opened(self) -> Iterator[Run]:
        """Open all that is there now, as a check of the whole would.

        Raises:
            InputError: if nothing is there, or it cannot be read.
        """
        paths = self._now()
        if paths is None:
            raise InputError(f"{self.name}: nothing is there any more")
        with open_any(
            paths, trainer=self._trainer, options=self._options, tell=lambda sentence: None, logs_alone=True
        ) as run:
            yield run


def _any_run_file(paths: Sequence[str]) -> bool:
    from rolloutdoctor.io.locations.paths import expand

    try:
        return bool(expand(paths).files)
    except InputError:
        return False

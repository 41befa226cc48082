"""Follow run files: a folder to which files are added, or a file that is replaced by a longer one."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rolloutdoctor.commands.follow.feed import Fresh, late_rows, whole_steps
from rolloutdoctor.commands.follow.trail import Trail
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.io.locations.paths import Source, expand
from rolloutdoctor.io.metrics import read_metrics
from rolloutdoctor.io.parquet.files import RunFile, read_footer
from rolloutdoctor.io.parquet.index import RowGroup, build_index, keys_of
from rolloutdoctor.io.run import Run, agreed_metadata
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.table import ALIASES

_RANK = re.compile(r"\.rank([0-9]+)\.")

Stamp = tuple[int, int, int]


@dataclass
class _Seen:
    """A run file that was looked at.

    Attributes:
        stamp: size, time of the last change and number of the file.
        file: its footer.
        row_groups: what is in it.
        begun: its latest step.
        is_done: True if all its steps were counted.
    """

    stamp: Stamp
    file: RunFile
    row_groups: Sequence[RowGroup]
    begun: int
    is_done: bool = False


class RunFilesFeed:
    """Parquet files with rows; a file is read once it is whole, which its footer says.

    Args:
        paths: files, folders and patterns.
        trainer: who wrote them, or None: as they say.
        is_whole: True if a recorder has closed them, so that every step in them is whole.
    """

    def __init__(self, paths: Sequence[str], trainer: str | None, *, is_whole: bool = False) -> None:
        self._paths, self._trainer, self._is_whole = tuple(paths), trainer, is_whole
        self.name = " ".join(Source.of(path).name for path in paths)
        self.files: tuple[str, ...] = ()
        self.trail = Trail()
        self.replaced, self.waits_for = False, ""
        self._seen: dict[str, _Seen] = {}
        self._stamps: dict[str, Stamp] = {}
        self._tables: dict[str, Stamp] = {}
        self._columns: frozenset[str] | None = None
        self._logged: int | None = None
        self._taken = StepSpans()
        self._is_rewound = False

    def rewind(self) -> None:
        """Read all files again."""
        for entry in self._seen.values():
            entry.is_done = False
        self._tables.clear()
        self._taken = StepSpans()
        self._is_rewound = True

    def changed(self) -> bool:
        """Tell whether a file is new or has changed."""
        try:
            sources = expand(self._paths)
        except InputError:
            return False
        stamps = {source.path: _stamp(source.path) for source in (*sources.files, *sources.metrics)}
        before, self._stamps = self._stamps, stamps
        self.replaced = any(path in self._seen and self._seen[path].stamp != stamp for path, stamp in stamps.items())
        return stamps != before

    @contextmanager
    def fresh(self, counted: StepSpans, *, ended: bool) -> Iterator[Fresh | None]:
        """Read the footers that are new, and give the steps that are whole."""
        self._is_rewound = False
        try:
            sources = expand(self._paths)
        except InputError as error:
            if ended:
                raise
            self.waits_for = str(error)
            yield None
            return
        self.waits_for = ""
        self._log(sources.metrics)
        there: set[StepKey] = set()
        for source in sources.files:
            there.update(self._look(source, counted, ended=ended))
        tracked = [self._seen[source.path] for source in sources.files if source.path in self._seen]
        self.files = tuple(entry.file.name for entry in tracked)
        if not tracked:
            yield None
            return
        columns = frozenset.intersection(*(frozenset(entry.file.columns) for entry in tracked))
        if self._columns is not None and not columns >= self._columns:
            # A check of all files reads what all of them have: the steps that were counted have to be read again.
            for entry in tracked:
                entry.is_done = False
        self._columns = columns
        dropped = {StepKey(*key) for entry in tracked for key in entry.file.metadata.dropped_steps}
        begun, logged = _begun(tracked), self._logged
        ready = tuple(whole_steps(there - dropped, counted, begun=begun, logged=logged, ended=ended or self._is_whole))
        yield Fresh(self._run(tracked), ready) if ready else None
        for key in () if self._is_rewound else ready:
            self._taken.add(key)

    def _run(self, tracked: Sequence[_Seen]) -> Run:
        """The files that hold steps to be counted; one of the others, so that rows are named as in several files."""
        chosen = [entry for entry in tracked if not entry.is_done]
        if len(chosen) == 1 and len(tracked) > 1:
            chosen = [entry for entry in tracked if entry.is_done][:1] + chosen
        files = [entry.file for entry in chosen]
        run = Run(files, agreed_metadata([entry.file for entry in tracked]), self.trail.metrics())
        run.partial_columns |= run.columns - (self._columns or frozenset())
        run.columns &= self._columns or frozenset()
        return run

    def _look(self, source: Source, counted: StepSpans, *, ended: bool) -> set[StepKey]:
        """Steps of a file that were not counted."""
        stamp = self._stamps.get(source.path) or _stamp(source.path)
        entry = self._seen.get(source.path)
        if entry is None or entry.stamp != stamp:
            try:
                file = read_footer(source, self._trainer, ALIASES)
                row_groups = build_index([file])
            except InputError as error:
                if ended:
                    raise
                # Whoever writes it is not done: its footer comes last.
                self.waits_for = str(error)
                return set()
            begun = max((group.high for group in row_groups), default=-1)
            is_new = entry is None
            entry = self._seen[source.path] = _Seen(stamp, file, row_groups, begun)
            late = [key for key in self._keys(entry, StepSpans()) if key in self._taken] if is_new else []
            if late:
                raise late_rows(source.name, min(late))
        if entry.is_done:
            return set()
        there = {key for key in self._keys(entry, counted) if key not in counted}
        entry.is_done = not there
        return there

    def _keys(self, entry: _Seen, counted: StepSpans) -> set[StepKey]:
        keys: set[StepKey] = set()
        unclear = []
        for group in entry.row_groups:
            if group.only is not None:
                keys.add(group.only)
            elif not all(counted.holds(group.low, group.high, split) for split in group.splits):
                unclear.append(group)
        if unclear:
            with entry.file.opened() as opened:
                for row_group in unclear:
                    keys.update(key for key, _ in keys_of(opened, row_group.group, row_group.numbers))
        return keys

    def _log(self, tables: Sequence[Source]) -> None:
        """Read the tables of metrics that are new or have changed."""
        for table in tables:
            stamp = _stamp(table.path)
            if self._tables.get(table.path) == stamp:
                continue
            metrics = read_metrics([table])
            for key in metrics.steps():
                self.trail.add(key, dict(metrics.at(key)))
                if key.split == TRAIN:
                    self._logged = max(self._logged or 0, key.step)
            self._tables[table.path] = stamp


def _begun(tracked: Sequence[_Seen]) -> int:
    """The latest step that every rank has begun."""
    latest: dict[str, int] = {}
    for entry in tracked:
        match = _RANK.search(os.path.basename(entry.file.source.path))  # noqa: PTH119 - an address perhaps
        rank = match[1] if match else ""
        latest[rank] = max(latest.get(rank, -1), entry.begun)
    return min(latest.values(), default=-1)


def _stamp(path: str) -> Stamp:
    try:
        status = os.stat(path)  # noqa: PTH116 - keeps the name as given
    except OSError:
        return (-1, 0, 0)
    return (status.st_size, status.st_mtime_ns, status.st_ino)

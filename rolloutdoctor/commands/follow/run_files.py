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
        for seen in self._seen.values():
            seen.is_done = False
        self._tables.clear()
        self._taken = StepSpans()
        self._is_rewound = True

    def changed(self) -> bool:
        """Tell whether a file is new or has changed."""
        try:
            found = expand(self._paths)
        except InputError:
            return False
        stamps = {source.path: _stamp(source.path) for source in (*found.files, *found.metrics)}
        before, self._stamps = self._stamps, stamps
        self.replaced = any(path in self._seen and self._seen[path].stamp != stamp for path, stamp in stamps.items())
        return stamps != before

    @contextmanager
    def fresh(self, counted: StepSpans, *, ended: bool) -> Iterator[Fresh | None]:
        """Read the footers that are new, and give the steps that are whole."""
        self._is_rewound = False
        try:
            found = expand(self._paths)
        except InputError as error:
            if ended:
                raise
            self.waits_for = str(error)
            yield None
            return
        self.waits_for = ""
        self._log(found.metrics)
        there: set[StepKey] = set()
        for source in found.files:
            there.update(self._look(source, counted, ended=ended))
        known = [self._seen[source.path] for source in found.files if source.path in self._seen]
        self.files = tuple(one.file.name for one in known)
        if not known:
            yield None
            return
        columns = frozenset.intersection(*(frozenset(one.file.columns) for one in known))
        if self._columns is not None and not columns >= self._columns:
            # A check of all files reads what all of them have: the steps that were counted have to be read again.
            for one in known:
                one.is_done = False
        self._columns = columns
        dropped = {StepKey(*key) for one in known for key in one.file.metadata.dropped_steps}
        begun, logged = _begun(known), self._logged
        ready = tuple(whole_steps(there - dropped, counted, begun=begun, logged=logged, ended=ended or self._is_whole))
        yield Fresh(self._run(known), ready) if ready else None
        for key in () if self._is_rewound else ready:
            self._taken.add(key)

    def _run(self, known: Sequence[_Seen]) -> Run:
        """The files that hold steps to be counted; one of the others, so that rows are named as in several files."""
        chosen = [one for one in known if not one.is_done]
        if len(chosen) == 1 and len(known) > 1:
            chosen = [one for one in known if one.is_done][:1] + chosen
        files = [one.file for one in chosen]
        run = Run(files, agreed_metadata([one.file for one in known]), self.trail.metrics())
        run.partial_columns |= run.columns - (self._columns or frozenset())
        run.columns &= self._columns or frozenset()
        return run

    def _look(self, source: Source, counted: StepSpans, *, ended: bool) -> set[StepKey]:
        """Steps of a file that were not counted."""
        stamp = self._stamps.get(source.path) or _stamp(source.path)
        seen = self._seen.get(source.path)
        if seen is None or seen.stamp != stamp:
            try:
                file = read_footer(source, self._trainer, ALIASES)
                row_groups = build_index([file])
            except InputError as error:
                if ended:
                    raise
                # Whoever writes it is not done: its footer comes last.
                self.waits_for = str(error)
                return set()
            begun = max((one.high for one in row_groups), default=-1)
            is_new = seen is None
            seen = self._seen[source.path] = _Seen(stamp, file, row_groups, begun)
            late = [key for key in self._keys(seen, StepSpans()) if key in self._taken] if is_new else []
            if late:
                raise late_rows(source.name, min(late))
        if seen.is_done:
            return set()
        there = {key for key in self._keys(seen, counted) if key not in counted}
        seen.is_done = not there
        return there

    def _keys(self, seen: _Seen, counted: StepSpans) -> set[StepKey]:
        found: set[StepKey] = set()
        unclear = []
        for one in seen.row_groups:
            if one.only is not None:
                found.add(one.only)
            elif not all(counted.holds(one.low, one.high, split) for split in one.splits):
                unclear.append(one)
        if unclear:
            with seen.file.opened() as opened:
                for one in unclear:
                    found.update(key for key, _ in keys_of(opened, one.group, one.numbers))
        return found

    def _log(self, tables: Sequence[Source]) -> None:
        """Read the tables of metrics that are new or have changed."""
        for table in tables:
            stamp = _stamp(table.path)
            if self._tables.get(table.path) == stamp:
                continue
            found = read_metrics([table])
            for key in found.steps():
                self.trail.add(key, dict(found.at(key)))
                if key.split == TRAIN:
                    self._logged = max(self._logged or 0, key.step)
            self._tables[table.path] = stamp


def _begun(known: Sequence[_Seen]) -> int:
    """The latest step that every rank has begun."""
    latest: dict[str, int] = {}
    for one in known:
        found = _RANK.search(os.path.basename(one.file.source.path))  # noqa: PTH119 - an address perhaps
        rank = found[1] if found else ""
        latest[rank] = max(latest.get(rank, -1), one.begun)
    return min(latest.values(), default=-1)


def _stamp(path: str) -> Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 - keeps the name as given
    except OSError:
        return (-1, 0, 0)
    return (found.st_size, found.st_mtime_ns, found.st_ino)

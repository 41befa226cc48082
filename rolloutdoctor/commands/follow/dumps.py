"""Follow a trainer's own dump: files of JSON Lines that grow, or files that are added."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from rolloutdoctor.commands.follow.feed import Fresh, whole_steps
from rolloutdoctor.commands.follow.trail import Trail
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.importers.base import ReadsByStep
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metrics import read_metrics
from rolloutdoctor.io.parquet.files import read_footer
from rolloutdoctor.io.parquet.index import keys_of
from rolloutdoctor.io.run import Run
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.io.write.writer import metrics_path
from rolloutdoctor.opening.dumps import ConvertOptions, Detected, convert, detect_dump
from rolloutdoctor.results.errors import InputError, RolloutDoctorError
from rolloutdoctor.trainers.table import ALIASES


class DumpFeed:
    """Dump of a trainer, read through its importer and a temporary run file.

    A dump of one file for each step is read file by file, and no file again once its steps were counted. Of other
    dumps a row may be named by its place in the whole: they are read again whenever they have grown.
    """

    def __init__(self, dump: Detected, paths: Sequence[str], options: ConvertOptions, trainer: str | None) -> None:
        self._found, self._paths, self._options, self._trainer = dump, tuple(paths), options, trainer
        self._by_file = dump.importer if isinstance(dump.importer, ReadsByStep) else None
        self.name = " ".join(source.name for source in dump.sources)
        self.files: tuple[str, ...] = (self.name,)
        self.trail = Trail()
        self.replaced, self.waits_for = False, ""
        self._sizes: dict[str, tuple[int, int]] = {}
        self._done: set[str] = set()

    def rewind(self) -> None:
        """Read all files again."""
        self._done.clear()

    def changed(self) -> bool:
        """Tell whether a file is new or has grown.

        Raises:
            InputError: if one is shorter than it was.
        """
        sizes = {}
        for path in below([source.path for source in (*self._found.sources, *self._found.logs)]):
            try:
                status = os.stat(path)  # noqa: PTH116 - keeps the name as given
            except OSError:
                continue
            sizes[path] = (status.st_size, status.st_mtime_ns)
            if path in self._sizes and status.st_size < self._sizes[path][0]:
                raise InputError(
                    f"{Source.of(path).name}: shorter than what was read of it, so that it was cut off or replaced; "
                    "follow it from its start with another --state"
                )
        before, self._sizes = self._sizes, sizes
        return sizes != before

    @contextmanager
    def fresh(self, counted: StepSpans, *, ended: bool) -> Iterator[Fresh | None]:
        """Read what is not counted yet through the importer; a last line without its end waits."""
        # The log beside a folder may have come after the first rows.
        dump = detect_dump(self._paths, self._options) or self._found
        if self._by_file is not None:
            files = [file for file in self._by_file.step_files(dump.sources) if file.path not in self._done]
            dump = replace(dump, sources=tuple(files))
        if not dump.sources:
            yield None
            return
        with scratch_folder() as folder:
            path = folder / "run.parquet"
            try:
                with nullcontext() if ended else lines.growing():
                    convert(dump, path, self._options)
            except RolloutDoctorError as error:
                if ended:
                    raise
                # Its last file may be half written.
                self.waits_for = str(error)
                yield None
                return
            self.waits_for = ""
            file = read_footer(Source(str(path), self.name), self._trainer, ALIASES)
            self._log(path)
            there: set[StepKey] = set()
            with file.opened() as opened:
                first = 0
                for group, rows in enumerate(file.row_group_rows()):
                    there.update(key for key, _ in keys_of(opened, group, range(first, first + rows)))
                    first += rows
            begun = max(key.step for key in there)
            logged = self.trail.last(TRAIN)
            ready = tuple(whole_steps(there, counted, begun=begun, logged=logged, ended=ended))
            run = Run([file], file.metadata, self.trail.metrics(), self._found.sources)
            yield Fresh(run, ready) if ready else None
        if self._by_file is not None:
            self._finish(dump.sources, counted)

    def _finish(self, files: Sequence[Source], counted: StepSpans) -> None:
        """Note the files whose steps were all counted, by the step on their first and last line."""
        for file in files[:-1]:
            steps = [_step(line) for line in _ends(Path(file.path))]
            if all(step is not None and StepKey(step, TRAIN) in counted for step in steps):
                self._done.add(file.path)

    def _log(self, path: Path) -> None:
        table = metrics_path(path)
        if not table.exists():
            return
        metrics = read_metrics([Source(str(table), self.name)])
        for key in metrics.steps():
            self.trail.add(key, dict(metrics.at(key)))


def below(paths: Sequence[str]) -> Iterator[str]:
    """Yield files by their paths, and those in folders at any depth."""
    for path in paths:
        if os.path.isdir(path):  # noqa: PTH112 - keeps the name as given
            for folder, _, names in os.walk(path):
                yield from (os.path.join(folder, name) for name in names)  # noqa: PTH118
        else:
            yield path


def _ends(path: Path) -> tuple[bytes, bytes]:
    """First and last whole line of a file."""
    try:
        with path.open("rb") as file:
            first = file.readline(lines.LONGEST_LINE)
            size = file.seek(0, os.SEEK_END)
            back = 2**16
            while True:
                file.seek(max(0, size - back))
                last_lines = [line for line in file.read(back).splitlines(keepends=True) if line.strip()]
                if len(last_lines) > 1 or back >= size:
                    return first, last_lines[-1] if last_lines else first
                back *= 4
    except OSError:
        return b"", b""


def _step(line: bytes) -> int | None:
    body = lines.parse(line)
    step = None if body is None else body.get("step")
    return step if isinstance(step, int) else None

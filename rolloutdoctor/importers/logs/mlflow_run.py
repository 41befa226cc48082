"""The folder of a run that MLflow keeps in files: a file for each metric."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.numbers import number as number_in
from rolloutdoctor.importers.logs.rows import entries_of
from rolloutdoctor.importers.reading.text_lines import lines_of
from rolloutdoctor.io.locations.paths import Source

_LINE = re.compile(r"[0-9]{9,16} (\S{1,40}) ([0-9]{1,18})")
_METRICS, _MOST = "metrics", 2_000


class MlflowRun:
    """``mlruns/EXPERIMENT/RUN``, with ``metrics/train/reward`` of lines ``TIME VALUE STEP``.

    ``FileStore._log_run_metric`` (mlflow/store/tracking/file_store.py) writes them.
    """

    def detect(self, path: Path) -> str | None:
        """Look at the first line of the first metric."""
        first = next(_files(path), None)
        line = next(lines_of(Source.of(str(first))), "") if first is not None else ""
        return "the folder of an MLflow run" if _LINE.fullmatch(line.strip()) else None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield the metrics, one after another."""
        path = Path(source.path)
        files = list(_files(path))
        if len(files) == _MOST:
            notes.say(f"the first {_MOST:,} metrics are read")
        for file in files:
            name = file.relative_to(path / _METRICS).as_posix()
            for number, line in enumerate(lines_of(Source.of(str(file))), start=1):
                match = _LINE.fullmatch(line.strip())
                if match is not None and (value := number_in(match[1])) is not None:
                    row = {"step": int(match[2]), "name": name, "value": value}
                    yield from entries_of(row, f"{source.name}/{_METRICS}/{name}, line {number}", notes)


def _files(path: Path) -> Iterator[Path]:
    """The files of the metrics, in the order of their names."""
    folder = path / _METRICS
    if folder.is_dir():
        yield from islice((file for file in sorted(folder.rglob("*")) if file.is_file()), _MOST)

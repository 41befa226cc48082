"""Dumps of a JSON object for each rollout or episode, on a line or in a file, in one folder or one for each step."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import folders, lines
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError

_CHUNK_ROWS = 4096
_LOOKED_AT = 3
"""Files of a folder, of which the first may be torn."""


class ScalarDump(ABC):
    """What importers of such dumps have in common.

    Attributes:
        keys: of every object.
        trainer: that trains on the rows; None where the dump does not say.
    """

    name: str
    summary: str
    recording: Mapping[str, str]
    keys: frozenset[str]
    trainer: str | None = None
    logs_beside = False
    checks_files = True
    omits_rows = True

    @abstractmethod
    def is_own(self, path: Path) -> bool:
        """Tell by its name whether a file may be one of the dump."""

    @abstractmethod
    def rows(self, body: dict[str, object], where: str, file: Source) -> Iterator[dict[str, object]]:
        """Yield the rows of an object, each with the same columns.

        Raises:
            DataError: if a field does not fit.
        """

    def detect(self, path: Path) -> str | None:
        """Recognise the dump by file names and the keys of the first object."""
        for file in self._files(path)[:_LOOKED_AT]:
            if self.keys <= (_first(file) or {}).keys():
                return f"{'the file' if path.is_file() else file.name} has the keys {', '.join(sorted(self.keys))}"
        return None

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their folders; what is torn is left out."""
        base.only_columns(self.name, options, ())
        files = folders.named(sources, self._files)
        total, done = sum(Path(file.path).stat().st_size for file in files), 0
        sink.begin(RunMetadata(trainer=self.trainer))
        for file in files:
            rows: list[dict[str, object]] = []
            last: dict[str, object] | None = None
            for body, where in _objects(file):
                if body is None:
                    sink.note(f"{where}: the last line was not written to its end, and is left out")
                    if last is not None:
                        sink.fact(int(str(last["step"])), str(last["split"]), base.TORN_LINES, 1)
                    continue
                if not body.keys() >= self.keys:
                    raise DataError(f"{where}: no {', '.join(sorted(self.keys - body.keys()))}; not of {self.name}")
                rows += self.rows(body, where, file)
                last = rows[-1] if rows else last
                if len(rows) >= _CHUNK_ROWS:
                    _flush(rows, file, sink)
            _flush(rows, file, sink)
            done += Path(file.path).stat().st_size
            sink.advance(done, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no rollout of {self.name} there")

    def _files(self, path: Path) -> list[Path]:
        if path.is_file():
            return [path] if self.is_own(path) else []
        try:
            inside = sorted(
                (entry for entry in path.iterdir() if entry.is_dir()), key=lambda entry: natural_key(entry.name)
            )
        except OSError:
            return []
        return [file for folder in (path, *inside) for file in folders.listed(folder, self.is_own)]


def _flush(rows: list[dict[str, object]], file: Source, sink: base.RunSink) -> None:
    if rows:
        sink.write_from(file, {name: [row[name] for row in rows] for name in rows[0]})
        rows.clear()


def _objects(file: Source) -> Iterator[tuple[dict[str, object] | None, str]]:
    """Yield the objects of a file, JSON Lines or one document, and where each is; None for one that is torn."""
    if file.path.endswith(".json"):
        body = _document(file)
        if body is not None or not lines.is_growing():
            yield body, file.name
        return
    for line in lines.objects(file):
        yield line.body, line.where if line.body is not None else file.name


def _document(file: Source) -> dict[str, object] | None:
    raw = read_small_bytes(file.path, name=file.name, expected="give one episode a file", most=lines.LONGEST_LINE)
    body = lines.document(raw)
    return body if isinstance(body, dict) else None


def _first(path: Path) -> dict[str, object] | None:
    if path.suffix == ".jsonl":
        return lines.first_object(path)
    try:
        return _document(Source.of(str(path)))
    except (InputError, ValueError, OSError):
        return None

"""The SQLite file of a trackio project, with the runs in it."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import Entry
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.importers.logs.runs_of_rows import entries_of_rows
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.importers.reading.sqlite_files import Database, opened, text_of
from rolloutdoctor.importers.reading.unchanged import kept
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError, SeveralRunsError

_MAGIC = b"SQLite format 3\0"
_KIND = "trackio project"
_LONGEST_SHOWN = 80
_COLUMNS = {"id", "run_name", "step", "metrics"}


class TrackioProject:
    """``PROJECT.db`` of a single run, or ``PROJECT.db/RUN``.

    ``SQLiteStorage.init_db`` (trackio/sqlite_storage.py): a row for each call, its metrics as JSON, text or bytes.
    """

    def detect(self, path: Path) -> str | None:
        """Look for the table of metrics."""
        file, _ = _split(path)
        try:
            if file is not None:
                with opened(file, path.name, _KIND) as database:
                    return "a trackio project" if database.columns("metrics") >= _COLUMNS else None
        except InputError:
            pass
        return None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what the run logged.

        Raises:
            InputError: if the file cannot be read, or has no such run.
            SeveralRunsError: if it holds several runs, and none is named.
        """
        with _chosen(source) as (database, _, run):
            rows = database.rows_at("SELECT step, metrics FROM metrics NOT INDEXED", run.places)
            yield from entries_of_rows(list(_rows(rows, source.name)), notes)


def trackio_config(source: Source) -> dict[str, object]:
    """Return the config of a run as `trackio.init` was given it, without trackio's own keys.

    Raises:
        InputError: if the file cannot be read.
        SeveralRunsError: if it holds several runs, and none is named.
    """
    with _chosen(source) as (database, column, run):
        if not {"id", "config", column} <= database.columns("configs"):
            return {}
        query = f"SELECT {column}, config FROM configs NOT INDEXED ORDER BY rowid DESC"
        config = next((config for of_run, config in database.rows(query) if of_run == run.key), None)
    body = None if config is None else lines.parse(_raw(config))
    return {name: value for name, value in (body or {}).items() if not name.startswith("_")}


def trackio_runs(path: Path) -> list[str]:
    """Return the names of the runs of a project; empty if it is none."""
    if not path.is_file() or TrackioProject().detect(path) is None:
        return []
    return list(_runs(path, path.name)[1])


@dataclass
class _Run:
    """A run of a project.

    Attributes:
        key: what its rows have in the column that tells runs apart.
        places: the `rowid` of each of them, in order.
    """

    key: object
    places: "array[int]" = field(default_factory=lambda: array("q"))


@contextmanager
def _chosen(source: Source) -> Iterator[tuple[Database, str, _Run]]:
    """The run that is meant, and the column that tells runs apart."""
    file, name = _split(Path(source.path))
    if file is None:
        raise InputError(f"{source.name}: no trackio project is there")
    with opened(file, source.name, _KIND) as database:
        column, runs = _runs(file, source.name if name is None else source.name.removesuffix(f"/{name}"))
        some = ", ".join(run[:_LONGEST_SHOWN] for run in [*runs][:3]) + (", ..." if len(runs) > 3 else "")
        if name is None and len(runs) > 1:
            raise SeveralRunsError(
                f"{source.name}: {len(runs):,} trackio runs ({some}); "
                f"give one of them as {source.name}/RUN, or check them with --each"
            )
        if not runs or (name is not None and name not in runs):
            raise InputError(f"{source.name}: no such run is in the trackio project (it has {some or 'none'})")
        yield database, column, runs[name] if name is not None else next(iter(runs.values()))


@kept(1)
def _runs(file: Path, name: str) -> tuple[str, dict[str, _Run]]:
    """The column that tells runs apart, and the run of each name; of runs with one name each goes by its id."""
    names: dict[object, str] = {}
    runs: dict[object, _Run] = {}
    with opened(file, name, _KIND) as database:
        column = "run_id" if "run_id" in database.columns("metrics") else "run_name"
        query = f"SELECT rowid, run_name, {column} FROM metrics NOT INDEXED ORDER BY rowid"
        for place, title, key in database.rows(query):
            if key not in names:
                names[key], runs[key] = text_of(title), _Run(key)
            if isinstance(place, int):
                runs[key].places.append(place)
    times = Counter(names.values())
    return column, {title if times[title] == 1 else text_of(key): runs[key] for key, title in names.items()}


def _split(path: Path) -> tuple[Path | None, str | None]:
    """The SQLite file in a path, and what follows it, which names a run."""
    for file in (path, *path.parents):
        try:
            if file.is_file():
                with file.open("rb") as stream:
                    is_database = stream.read(len(_MAGIC)) == _MAGIC
                return (file if is_database else None), (str(path.relative_to(file)) if file != path else None)
        except OSError:
            return None, None
        if file.is_dir():
            break
    return None, None


def _rows(rows: Iterator[tuple[object, ...]], name: str) -> Iterator[Row]:
    for number, (step, metrics) in enumerate(rows, start=1):
        body = lines.parse(_raw(metrics))
        if body is None:
            raise InputError(f"{name}, record {number}: its metrics are no JSON object; copy the file again")
        yield {"_step": step, **body}, f"{name}, record {number}"


def _raw(cell: object) -> bytes:
    return cell if isinstance(cell, bytes) else b""

"""The SQLite file of a trackio project, with the runs in it."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rolloutdoctor.importers.logs.base import Entry, LogNotes, entries_of_tracker
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError, SeveralRunsError

_MAGIC = b"SQLite format 3\0"
_LONGEST = 32 * 2**20
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
                with _opened(file, path.name) as database:
                    return "a trackio project" if _columns(database, "metrics") >= _COLUMNS else None
        except InputError:
            pass
        return None

    def read(self, source: Source, notes: LogNotes) -> Iterator[Entry]:
        """Yield what the run logged.

        Raises:
            InputError: if the file cannot be read, or has no such run.
            SeveralRunsError: if it holds several runs, and none is named.
        """
        with _chosen(source) as (database, column, run):
            rows = database.execute(
                f"SELECT step, metrics FROM metrics WHERE {column} = CAST(? AS TEXT) ORDER BY id", (run,)
            )
            yield from entries_of_tracker(list(_rows(rows, source.name)), source.name, notes)


def trackio_config(source: Source) -> dict[str, object]:
    """Return the config of a run as `trackio.init` was given it, without trackio's own keys.

    Raises:
        InputError: if the file cannot be read.
        SeveralRunsError: if it holds several runs, and none is named.
    """
    with _chosen(source) as (database, column, run):
        if not {"id", "config", column} <= _columns(database, "configs"):
            return {}
        row = database.execute(
            f"SELECT config FROM configs WHERE {column} = CAST(? AS TEXT) ORDER BY id DESC", (run,)
        ).fetchone()
    body = None if row is None else lines.parse(_raw(row[0]))
    return {name: value for name, value in (body or {}).items() if not name.startswith("_")}


def trackio_runs(path: Path) -> list[str]:
    """Return the names of the runs of a project; empty if it is none."""
    if not path.is_file() or TrackioProject().detect(path) is None:
        return []
    with _opened(path, path.name) as database:
        return list(_runs(database)[1])


@contextmanager
def _chosen(source: Source) -> Iterator[tuple[sqlite3.Connection, str, object]]:
    """The run that is meant: the column that tells its rows, and the value there."""
    file, name = _split(Path(source.path))
    if file is None:
        raise InputError(f"{source.name}: no trackio project is there")
    with _opened(file, source.name) as database:
        column, runs = _runs(database)
        shown = ", ".join([*runs][:3]) + (", ..." if len(runs) > 3 else "")
        if name is None and len(runs) > 1:
            raise SeveralRunsError(
                f"{source.name}: {len(runs)} trackio runs ({shown}); "
                f"give one of them as {source.name}/RUN, or check them with --each"
            )
        if not runs or (name is not None and name not in runs):
            raise InputError(f"{source.name}: no such run is in the trackio project (it has {shown or 'none'})")
        yield database, column, runs[name] if name is not None else next(iter(runs.values()))


def _runs(database: sqlite3.Connection) -> tuple[str, dict[str, object]]:
    """The column that tells runs apart, and its value for each name; of runs with one name each goes by its id."""
    column = "run_id" if "run_id" in _columns(database, "metrics") else "run_name"
    query = f"SELECT run_name, {column} FROM metrics GROUP BY {column} ORDER BY min(id)"
    found = [(_text(name), run) for name, run in database.execute(query)]
    names = [name for name, _ in found]
    return column, {name if names.count(name) == 1 else _text(run): run for name, run in found}


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


@contextmanager
def _opened(file: Path, name: str) -> Iterator[sqlite3.Connection]:
    """Open to read alone; rows that a run which goes on has in its write-ahead log are read, too."""
    log = Path(f"{file}-wal")
    try:
        options = "mode=ro" if log.is_file() and log.stat().st_size else "mode=ro&immutable=1"
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?{options}", uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            database.execute("PRAGMA trusted_schema = OFF")
            database.text_factory = bytes
            yield database
    except (sqlite3.Error, OSError, MemoryError) as error:
        raise InputError(f"{name}: not a readable trackio project ({str(error) or 'damaged'}); copy it again") from None


def _columns(database: sqlite3.Connection, table: str) -> set[str]:
    """The columns of a table; none of a view, or of a table that is computed, which may have no end."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
    made = database.execute(query, (table,)).fetchone()
    if made is None or not _text(made[0]).upper().startswith("CREATE TABLE"):
        return set()
    return {_text(row[1]) for row in database.execute(f"PRAGMA table_info({table})")}


def _rows(rows: sqlite3.Cursor, name: str) -> Iterator[dict[str, object]]:
    for number, (step, metrics) in enumerate(rows, start=1):
        body = lines.parse(_raw(metrics))
        if body is None:
            raise InputError(f"{name}, record {number}: its metrics are no JSON object; copy the file again")
        yield {"_step": step, **body}


def _raw(cell: object) -> bytes:
    return cell if isinstance(cell, bytes) else b""


def _text(cell: object) -> str:
    return _raw(cell).decode("utf-8", "backslashreplace")

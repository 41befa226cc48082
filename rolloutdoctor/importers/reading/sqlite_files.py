"""SQLite files, read in time and memory that follow their size, whatever their pages say."""

import shutil
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rolloutdoctor.io.locations.paths import reason
from rolloutdoctor.io.write.scratch import scratch_folder
from rolloutdoctor.results.errors import InputError

_LONGEST = 32 * 2**20
"""Bytes of a value."""

_INSTRUCTIONS = 10_000
"""Instructions of SQLite's machine between two looks for a signal."""

_AT_ONCE = 500
"""Rows that one query names."""

_FEWEST, _A_BYTE = 2_000_000, 2
"""Instructions that are allowed for any file, and for each of its bytes; a row takes some 20, and 30 bytes or more."""


class Database:
    """A database that is open to be read.

    Pages of a damaged file may be children of each other, so that a table has 10^12 rows: what is read is never more
    bytes than the file has.
    """

    def __init__(self, connection: sqlite3.Connection, size: int) -> None:
        self._connection = connection
        self._size = size
        self._left = _FEWEST + _A_BYTE * size
        self._raised: BaseException | None = None
        connection.set_progress_handler(self._proceed, _INSTRUCTIONS)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.text_factory = bytes

    def rows(self, query: str, values: Sequence[object] = ()) -> Iterator[tuple[object, ...]]:
        """Yield the rows of a query that sorts nothing; a text is bytes.

        Raises:
            sqlite3.Error: if the file is damaged.
        """
        yield from self._executed([(query, values)])

    def rows_at(self, query: str, places: Sequence[int]) -> Iterator[tuple[object, ...]]:
        """Yield some rows of a query without conditions, by their `rowid`, which is looked up and not searched for.

        Raises:
            sqlite3.Error: if the file is damaged.
        """
        parts = (places[start : start + _AT_ONCE] for start in range(0, len(places), _AT_ONCE))
        yield from self._executed(
            (f"{query} WHERE rowid IN ({', '.join('?' * len(some))}) ORDER BY rowid", some) for some in parts
        )

    def _executed(self, queries: Iterable[tuple[str, Sequence[object]]]) -> Iterator[tuple[object, ...]]:
        read = 0
        try:
            for query, values in queries:
                for row in self._connection.execute(query, tuple(values)):
                    read += sum(len(cell) for cell in row if isinstance(cell, bytes))
                    if read > self._size:
                        raise sqlite3.DatabaseError("it holds more text than the file has bytes")
                    yield row
        except sqlite3.Error:
            if self._raised is not None:
                raise self._raised from None
            raise

    def columns(self, table: str) -> set[str]:
        """Names of the columns of a table; none of a view, or of a table that is computed, which may have no end."""
        query = "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = ?"
        definition = next(self.rows(query, (table,)), None)
        if definition is None or not text_of(definition[0]).upper().startswith("CREATE TABLE"):
            return set()
        return {text_of(row[1]) for row in self.rows(f"PRAGMA table_info({table})")}

    def _proceed(self) -> bool:
        """Stop where the file allows no more; SQLite drops what a signal raises in here, so it is kept."""
        try:
            self._left -= _INSTRUCTIONS
            return self._left < 0
        except BaseException as error:
            self._raised = error
            return True


@contextmanager
def opened(file: Path, name: str, kind: str) -> Iterator[Database]:
    """Open a file to read alone; rows that a run which goes on has in its write-ahead log are read, too.

    Args:
        file: to open.
        name: how messages call it.
        kind: what it should be, for messages.

    Raises:
        InputError: if it cannot be read.
    """
    log = Path(f"{file}-wal")
    try:
        written = log.stat().st_size if log.is_file() else 0
        options = "mode=ro" if written else "mode=ro&immutable=1"
        with ExitStack() as stack:
            if written and not Path(f"{file}-shm").exists():
                # SQLite would make the index of the log beside the file, and leave it, or fail in a folder that is
                # read-only. Nobody writes: who does has the index open.
                folder = stack.enter_context(scratch_folder())
                shutil.copyfile(log, folder / "copy.db-wal")
                file = shutil.copyfile(file, folder / "copy.db")
            connection = sqlite3.connect(f"{file.absolute().as_uri()}?{options}", uri=True)
            stack.enter_context(closing(connection))
            yield Database(connection, file.stat().st_size + written)
    except OSError as error:
        raise InputError(f"{name}: {reason(error)}") from None
    # The text of SQLite's own error may hold a name that is not UTF-8.
    except (sqlite3.Error, UnicodeError, MemoryError, OverflowError) as error:
        words = str(error) if isinstance(error, sqlite3.Error) else "damaged"
        raise InputError(f"{name}: not a readable {kind} ({words}); copy it again") from None


def text_of(cell: object) -> str:
    """Return a cell as text; empty if it is none."""
    return cell.decode("utf-8", "backslashreplace") if isinstance(cell, bytes) else ""

"""Writing beside a training: a thread, a bounded queue, a count of what it could not take."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

QUEUE_TABLES = 16
"""Tables that wait for the writer at most; the next one waits `LONGEST_WAIT` for a place and is dropped then."""

LONGEST_WAIT = 0.25
"""Seconds that a slow disk may hold the training up, for each step."""

_log = logging.getLogger(__name__)

# What is queued: makes the table in the thread. A step of rows has its key, logged metrics have none.
_Item = tuple["Callable[[], pa.Table] | None", tuple[int, str] | None]


def warn(message: str) -> None:
    """Warn, or log it where warnings are errors: one of ours must not stop a training."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Warning:
        _log.warning(message)


class BackgroundWriter:
    """Takes tables from a training and writes them, in a thread, to a journal that becomes a run file on closing.

    Nothing here raises into the training once it is made: what goes wrong is kept in `failure`. Items are closures, so
    that encoding is the thread's work too.

    A recording never replaces another one. Where the run file is there already, or somebody else records it, the
    recording takes the next free name, ``run.2.parquet``, and says so in a warning: to refuse would raise into a
    training that may have waited long for its machines.

    Args:
        path: the run file.
        metadata: who makes the run, and the options.
        max_bytes: about how large the journal may get; what would make it larger ends the recording.

    Raises:
        UsageError: if nothing can be written at `path`.
    """

    def __init__(self, path: Path, metadata: RunMetadata, *, max_bytes: int) -> None:
        from rolloutdoctor.io.write.journal import Dropped, JournalWriter

        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path.parent}: cannot be made ({error.strerror})") from error
        self.failure = ""
        self.dropped = Dropped()
        self._asked, self._max_bytes = path, max_bytes
        self._journal = JournalWriter(path, metadata)
        self.path = self._journal.run_path
        """The run file, under the name that was free."""
        if self.path != path:
            warn(f"rolloutdoctor records to {self.path}: {path} is there already, or is being recorded")
        self._queue: queue.Queue[_Item] = queue.Queue(QUEUE_TABLES)
        # A forked child has the object but not the thread, and must leave the files alone.
        self._process = os.getpid()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="rolloutdoctor", daemon=True)
        self._thread.start()

    @property
    def journal_path(self) -> Path:
        """Return the path of the recording while it goes on."""
        return self._journal.path

    def put(self, make: "Callable[[], pa.Table]", key: tuple[int, str] | None = None) -> bool:
        """Queue a table; False if the recording has ended or the queue stayed full, which is counted.

        Args:
            make: makes the table, in the thread.
            key: step and split of rows; None for logged metrics.
        """
        if self._closed or self.failure or os.getpid() != self._process:
            return False
        try:
            if key is not None:
                # A kill then loses this step and no earlier one, unless writing is slower than training.
                with self._queue.all_tasks_done:
                    self._queue.all_tasks_done.wait_for(self._is_idle, LONGEST_WAIT / 2)
            self._queue.put((make, key), timeout=LONGEST_WAIT / 2)
        except queue.Full:
            from rolloutdoctor.io.write.journal import Dropped

            steps = self.dropped.steps if key is None else (*self.dropped.steps, key)
            self.dropped = Dropped(steps, self.dropped.logs + (key is None))
            return False
        return True

    def _is_idle(self) -> bool:
        return not self._queue.unfinished_tasks

    def close(self, recording: Mapping[str, object] | None = None) -> str:
        """Write what is queued and complete the run file; return what went wrong, in words, or nothing.

        Args:
            recording: what the recorder says of its work at the end, for the metadata.
        """
        if self._closed or os.getpid() != self._process:
            return ""
        self._closed = True
        failure = self.failure
        self._queue.put((None, None))
        self._thread.join()
        late = f"; {self.failure}" if self.failure != failure else ""
        try:
            return late + self._finish(recording)
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            return f"; {self.path} could not be completed: {type(error).__name__}: {error} ({self._rescue()})"

    def _finish(self, recording: Mapping[str, object] | None) -> str:
        try:
            if self.dropped:
                self._journal.drop(self.dropped)
            taken = self._placed(recording)
            self._journal.path.unlink()
        finally:
            # Not before: until the journal is gone the name is seen to be in use.
            self._journal.close()
        return taken + (f"; {self.dropped}" if self.dropped else "")

    def _placed(self, recording: Mapping[str, object] | None) -> str:
        """Complete the run file; say so if somebody who could not know of this recording has got its name."""
        from rolloutdoctor.io.write.journal import finish
        from rolloutdoctor.io.write.recordings import free_names
        from rolloutdoctor.io.write.replacing import TakenError

        try:
            finish(self._journal.path, self.path, recording)
        except TakenError:
            wanted = self.path
            self.path = next(free_names(self._asked))
            finish(self._journal.path, self.path, recording)
            return f"; another file has got the name {wanted} meanwhile, so the recording is {self.path}"
        return ""

    def _rescue(self) -> str:
        if not self.journal_path.exists():
            return f"{self.journal_path}, in which it was recorded, is gone"
        return (
            f"what was recorded is in {self.journal_path}; every command reads it, and convert makes a run file of it"
        )

    def _work(self) -> None:
        noted = self.dropped
        while True:
            make, key = self._queue.get()
            if make is None:
                return
            try:
                # After a failure the queue is only emptied, so that nobody waits for a place.
                if not self.failure:
                    self._write(make(), key)
                if self.dropped is not noted:
                    noted = self.dropped
                    self._journal.drop(noted)
            except Exception as error:  # the same boundary as in `close`
                self.failure = f"{type(error).__name__}: {error}"
            finally:
                self._queue.task_done()

    def _write(self, entry: "pa.Table", key: tuple[int, str] | None) -> None:
        within = None if key is None else self._max_bytes
        if not self._journal.append(entry, within=within) and key is not None:
            self.failure = f"at step {key[0]}: max_bytes={self._max_bytes} is reached"


def close_at_exit(close: Callable[[], None]) -> Callable[[], None]:
    """Close when the interpreter exits; returns what takes that back."""
    atexit.register(close)

    def forget() -> None:
        with contextlib.suppress(Exception):
            atexit.unregister(close)

    return forget

"""Reading ahead: a thread reads what comes next while the caller works on what came last."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

R = TypeVar("R")
T = TypeVar("T")

LEAST_ROOM = 6 * 2**20
"""Bytes that may be read ahead in any case."""

FULL_ROOM = 64 * 2**20
"""Up to so many bytes, as much may be read ahead as is being worked on."""

_PATIENCE = 10.0
"""Seconds that an end waits for a read under way: a store may hang."""


def room_beside(held: int) -> int:
    """Bytes that may be read ahead while so many are worked on: as many, but beyond `FULL_ROOM` half of them.

    So a step of usual size is decoded while the one before it is evaluated, and a very large one does not meet another.
    """
    return max(LEAST_ROOM, min(held, FULL_ROOM), held // 2)


class Ahead(Generic[R, T]):
    """Items of an iterator that runs in a thread of its own, a bounded number of bytes before the caller.

    An item is finished in the caller's thread: two threads that both run Python wait for each other more than they
    work. An error of either reaches the caller when it has taken everything that came before.

    Attributes:
        is_waited_for: whether the caller has nothing to work on.
    """

    def __init__(
        self, start: "Callable[[Ahead[R, T]], Iterator[tuple[R, int]]]", finish: Callable[[R], tuple[T, int]]
    ) -> None:
        """Prepare to read; the thread lives inside a ``with`` block.

        Args:
            start: called in the thread, with this; its items are pairs of an item and the bytes that it holds.
            finish: makes of an item what the caller takes, and the bytes that this holds.
        """
        self._room = LEAST_ROOM
        self._start, self._finish = start, finish
        self._found: deque[tuple[R, int]] = deque()
        self._finished: deque[tuple[T, int]] = deque()
        self._held = 0
        self.is_waited_for = False
        self._error: BaseException | None = None
        self._done = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="rolloutdoctor-reader", daemon=True)

    @property
    def room(self) -> int:
        """Bytes that may be waiting; one item more is read whatever its size. May be set at any time."""
        return self._room

    @room.setter
    def room(self, room: int) -> None:
        with self._changed:
            self._room = room
            self._changed.notify_all()

    def widen(self, more: int) -> None:
        """Make room for more bytes, and finish what was found, so that it holds no more than it has to."""
        while self._found:
            try:
                self._finish_first()
            except Exception:
                # The caller takes what came before first.
                break
        self.room += more

    def _finish_first(self) -> None:
        found, before = self._found[0]
        item, size = self._finish(found)
        with self._changed:
            self._finished.append((item, size))
            self._found.popleft()
            self._held += size - before
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                while not self._finished and not self._found and not self._done:
                    self.is_waited_for = True
                    self._changed.wait()
                self.is_waited_for = False
            if not self._finished:
                if not self._found:
                    break
                self._finish_first()
            with self._changed:
                item, size = self._finished.popleft()
                self._held -= size
                self._changed.notify_all()
            yield item
            # Or the item would live on while the next one is waited for.
            del item
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopped = True
            self._found.clear()
            self._finished.clear()
            self._changed.notify_all()
        # A caller that was forgotten may be found as garbage here, in this thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)

    def _read(self) -> None:
        try:
            for item, size in self._start(self):
                with self._changed:
                    self._found.append((item, size))
                    self._held += size
                    self._changed.notify_all()
                    del item
                    while self._held > self._room and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        break
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

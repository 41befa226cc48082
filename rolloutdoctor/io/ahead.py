"""Reading ahead: a thread decodes what comes next while the caller works on what came last."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

LEAST_ROOM = 4 * 2**20
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


class Ahead(Generic[T]):
    """Items of an iterator that runs in a thread of its own, a bounded number of bytes before the caller.

    An error of the iterator reaches the caller when it has taken everything that came before.

    Attributes:
        is_waited_for: whether the caller has nothing to work on.
    """

    def __init__(self, start: "Callable[[Ahead[T]], Iterator[tuple[T, int]]]") -> None:
        """Prepare to read; the thread lives inside a ``with`` block.

        Args:
            start: called in the thread, with this; its items are pairs of an item and the bytes that it holds.
        """
        self._room = LEAST_ROOM
        self._start = start
        self._found: deque[tuple[T, int]] = deque()
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
        """Make room for more bytes."""
        self.room += more

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                while not self._found and not self._done:
                    self.is_waited_for = True
                    self._changed.wait()
                self.is_waited_for = False
                if not self._found:
                    break
                item, size = self._found.popleft()
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

"""Read ahead: a thread reads what comes next while the caller works on what came last."""

import threading
from collections import deque
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")

LEAST_ROOM = 6 * 2**20
"""Bytes that may be read ahead in any case."""

_PATIENCE = 10.0
"""Seconds that leaving waits for a read under way: a remote store may hang."""


class ReadAhead(Generic[T]):
    """Items of an iterator that runs in a thread of its own, a bounded number of bytes before the caller.

    An error of the iterator reaches the caller when it has taken everything that came before.

    Attributes:
        room: bytes that may be waiting, unless one item is larger. Items are expected to be as large as the one before.
            May be set at any time.
        is_waited_for: True while the caller has nothing to work on.
    """

    def __init__(self, items: Generator[tuple[T, int], None, None]) -> None:
        """Prepare to read; the thread lives inside a ``with`` block.

        Args:
            items: pairs of an item and the bytes that it holds; consumed and closed in the thread.
        """
        self._items = items
        self._room = LEAST_ROOM
        self._found: deque[tuple[T, int]] = deque()
        self._held = self._last = 0
        self.is_waited_for = False
        self._error: BaseException | None = None
        self._done = self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="rolloutdoctor-reader", daemon=True)

    @property
    def room(self) -> int:
        """See the class."""
        return self._room

    @room.setter
    def room(self, room: int) -> None:
        with self._changed:
            self._room = room
            self._changed.notify_all()

    def __iter__(self) -> Iterator[T]:
        while True:
            with self._changed:
                self.is_waited_for = True
                self._changed.wait_for(self._has_news)
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

    def _has_news(self) -> bool:
        return bool(self._found) or self._done

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
            for item, size in self._items:
                with self._changed:
                    self._found.append((item, size))
                    self._held += size
                    self._last = size
                    self._changed.notify_all()
                    del item
                    self._changed.wait_for(self._may_go_on)
                    if self._stopped:
                        break
        except BaseException as error:
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _may_go_on(self) -> bool:
        return not self._found or self._held + self._last <= self._room or self._stopped

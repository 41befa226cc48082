"""The chunks of steps of which more rows are to come, in bounded memory."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
from rolloutdoctor.io.parquet.index import Index, RowGroup
from rolloutdoctor.io.parquet.small_row_groups import Positioned
from rolloutdoctor.io.parquet.spill_file import WAITING_BYTES, SpillFile
from rolloutdoctor.io.parquet.step_chunks import StepChunk

MOST_OPEN_FILES = 64


class PendingSteps:
    """Chunks by step and split. What waits beyond `WAITING_BYTES` is in the temporary file.

    The step that is to be complete first stays in memory, however large: it is what memory is measured by.
    """

    def __init__(self, index: Index, spill: SpillFile) -> None:
        self._index, self._spill = index, spill
        self._chunks: dict[StepKey, list[tuple[tuple[int, int], StepChunk]]] = {}
        self._held: dict[StepKey, int] = {}

    def add(self, key: StepKey, row_group: RowGroup, chunk: StepChunk) -> None:
        """Keep a chunk until its step is taken."""
        self._chunks.setdefault(key, []).append(((row_group.file, row_group.group), chunk))
        self._held[key] = self._held.get(key, 0) + chunk.nbytes
        if sum(self._held.values()) > WAITING_BYTES:
            self._store_all_but(min(self._chunks, key=lambda each: (self._index.last.get(each, 0), each)))

    def take(self, key: StepKey) -> list[StepChunk]:
        """Hand over the chunks of a step, in the order of the files and their rows."""
        self._held.pop(key, None)
        return [chunk for _, chunk in sorted(self._chunks.pop(key), key=lambda entry: entry[0])]

    def leftover(self) -> tuple[StepKey, StepChunk] | None:
        """Return a step that was never complete, if there is one."""
        return next(((key, entries[0][1]) for key, entries in self._chunks.items()), None)

    def _store_all_but(self, first: StepKey) -> None:
        if sum(self._held.values()) - self._held[first] <= WAITING_BYTES:
            return
        for key, entries in self._chunks.items():
            if key != first:
                entries[:] = [(place, chunk.stored(self._spill)) for place, chunk in entries]
                self._held[key] = 0


@contextmanager
def row_groups_opened(
    files: "tuple[RunFile, ...]", plan: Sequence[list[Positioned]]
) -> Iterator[Iterator[tuple[list[Positioned], OpenFile]]]:
    """Go through row groups of one file each; a file is open from its first to its last, `MOST_OPEN_FILES` at most."""
    left = Counter(found[0][1].file for found in plan)
    opened: dict[int, tuple[ExitStack, OpenFile]] = {}

    def walk() -> Iterator[tuple[list[Positioned], OpenFile]]:
        for found in plan:
            file = found[0][1].file
            if file not in opened:
                if len(opened) >= MOST_OPEN_FILES:
                    opened.pop(next(iter(opened)))[0].close()
                stack = ExitStack()
                opened[file] = stack, stack.enter_context(files[file].opened())
            yield found, opened[file][1]
            left[file] -= 1
            if not left[file]:
                opened.pop(file)[0].close()

    try:
        yield walk()
    finally:
        for stack, _ in opened.values():
            stack.close()

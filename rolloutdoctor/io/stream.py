"""One pass over the files of a run: a batch for each step asked for, in the order in which they end."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from rolloutdoctor.data.batch import RolloutBatch, StepKey
from rolloutdoctor.data.token_columns import Arriving, TokenColumns
from rolloutdoctor.io.ahead import Ahead
from rolloutdoctor.io.arrivals import Rest, tasks_of
from rolloutdoctor.io.leases import Leases
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.index import Index, contradiction
from rolloutdoctor.io.parquet.slices import Asked, RawSlice, Share, Slice, slices_of
from rolloutdoctor.io.parquet.spill_file import Spill
from rolloutdoctor.io.parquet.step_chunks import assemble
from rolloutdoctor.io.pending_steps import Waiting, row_groups_opened

_Raw = tuple[int, RawSlice]
"""A slice, and the position of its row group in the index."""

_Found = tuple[int, Slice | RawSlice]
"""The same, finished; the rest of a step is finished where its batch asks for it."""


class Stream:
    """The batches of the steps asked for. A thread reads; all that takes Python is done by who asks for a batch."""

    def __init__(
        self,
        files: Sequence[RunFile],
        index: Index,
        asked: Asked,
        again: Callable[[StepKey], TokenColumns],
        progress: Callable[[int, int], None],
        partial_step: Callable[[RolloutBatch], None],
    ) -> None:
        """Plan what is to be read.

        Args:
            files: of the run.
            index: where its steps are.
            asked: columns and steps.
            again: reads the token columns of a step once more.
            progress: called with the rows done and the rows to do.
            partial_step: told of a batch that goes without a column that some of its rows have.
        """
        self._files, self._index, self._again, self._progress = tuple(files), index, again, progress
        self._partial_step = partial_step
        self._wanted = asked.wanted
        numbered = enumerate(index.row_groups)
        plan = [(position, found) for position, found in numbered if found.may_hold(asked.steps, asked.split)]
        self._tasks = tasks_of(files, plan, asked)
        # Steps that arrive, with the number of a file that each is in.
        heads = [task.row_group for task in self._tasks if task.asked.share is Share.HEAD]
        self._arrives = {found.only: found.file for found in heads}
        self._total, self._done = sum(found.rows for _, found in plan), 0
        self._finished: set[StepKey] = set()
        self._leases = Leases()

    def batches(self) -> Generator[RolloutBatch, None, None]:
        """Yield the batches, once; see `Run.batches`."""
        with Spill() as spill, Ahead(self._read, self._finish) as ahead:
            waiting = Waiting(self._index, spill)
            parts = iter(ahead)
            # No reference to a piece or a batch may be left in this frame, or a step would live on while the next is
            # decoded.
            for position, part in parts:
                assert isinstance(part, Slice)  # the rest of a step is taken where its batch asks for it
                for key in self._completed(position, part, waiting):
                    batch = assemble(key, waiting.take(key), several_files=len(self._files) > 1)
                    columns = batch.token_columns
                    if batch.incomplete:
                        self._partial_step(batch)
                    self._prepare(batch, parts, ahead)
                    try:
                        yield batch
                        columns.wait()
                    finally:
                        columns.forget()
                    self._leases.learn(key.split, columns)
                    del batch, columns
                if part.is_whole:
                    self._count(part)
                del part
            left = waiting.leftover()
            if left is not None:
                raise contradiction(left[1].file, left[0])

    def _read(self, reader: Ahead[_Raw, _Found]) -> Iterator[tuple[_Raw, int]]:
        with row_groups_opened(self._files, [task[:2] for task in self._tasks]) as walk:
            for (position, row_group, opened), task in zip(walk, self._tasks, strict=True):
                # A second thread inside the decoder pays only where nothing else is to be done.
                for part in slices_of(opened, row_group, task.asked, threads=lambda: reader.is_waited_for):
                    yield (position, part), part.held
                    del part

    def _finish(self, found: _Raw) -> tuple[_Found, int]:
        position, part = found
        if part.asked.share is Share.REST:
            return found, part.held
        seen = part.decoded().glanced(self._leases.unread)
        return (position, seen), seen.held

    def _completed(self, position: int, part: Slice, waiting: Waiting) -> Iterator[StepKey]:
        """Let the pieces of a slice wait, and yield the steps of which nothing more is to come."""
        for key in list(part.pieces):
            piece = part.pieces.pop(key)
            if key in self._finished:
                raise contradiction(piece.file, key)
            is_complete = key in part.ended and self._index.is_complete(key, position)
            # A slice that waits for later rows must not keep those of other steps in memory.
            is_slice = isinstance(piece.rows, range) and not is_complete and len(piece.rows) < part.rows
            waiting.add(key, self._index.row_groups[position], piece.detached() if is_slice else piece)
            del piece
            if is_complete:
                self._finished.add(key)
                yield key

    def _prepare(self, batch: RolloutBatch, parts: Iterator[_Found], ahead: Ahead[_Raw, _Found]) -> None:
        """Say what of a batch is to arrive, and what may go."""
        key, columns = batch.key, batch.token_columns
        if key in self._arrives:
            if not batch.tokens:
                # It was said to have more values than rows.
                raise contradiction(self._files[self._arrives[key]], key)
            rest = Rest(key, batch.rows.diff().numpy(), parts, self._seen)
            columns.expect(Arriving(self._wanted.rest.tokens, batch.tokens, rest.more))
            ahead.room = self._leases.grant_arriving(key.split, columns)
        else:
            ahead.room = self._leases.grant(key.split, columns, ahead.widen)
        if columns.may_go:
            columns.again = partial(self._again, key)

    def _seen(self, part: Slice) -> Slice:
        """Look at a slice of the rest of a step."""
        self._count(part)
        return part.glanced(self._leases.unread)

    def _count(self, part: Slice) -> None:
        self._done += part.rows
        self._progress(self._done, self._total)

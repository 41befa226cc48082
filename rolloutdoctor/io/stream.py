"""One pass over the files of a run: a batch for each step asked for, in the order in which they end."""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate

from rolloutdoctor.data.batch import RolloutBatch, StepKey
from rolloutdoctor.data.several_steps import SMALL
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
from rolloutdoctor.io.parquet.index import Index, contradiction
from rolloutdoctor.io.parquet.slices import ArrowRows, DecodedRows, ReadRequest, one_slice_of, slices_of
from rolloutdoctor.io.parquet.small_row_groups import Positioned, gathered
from rolloutdoctor.io.parquet.spill_file import SpillFile
from rolloutdoctor.io.parquet.step_chunks import assemble
from rolloutdoctor.io.pending_steps import PendingSteps, row_groups_opened
from rolloutdoctor.io.progress import Progress, Unit
from rolloutdoctor.io.read_ahead import LEAST_ROOM, ReadAhead

AHEAD = 1 / 16
"""Share of a step's bytes that may be read while it is evaluated.

More takes memory and saves no time: evaluation takes longer than decoding, and while a step is waited for, several
columns are decoded at a time.
"""

ROOM_FOR_SMALL_STEPS = 12 * 2**20
"""Bytes that may be read ahead of small steps: many are evaluated together, and take a while."""

_Raw = tuple[int, ArrowRows]
"""Rows, and the position of their row group in the index; of several, that of the last."""


class Stream:
    """The batches of the steps asked for. A thread reads; what takes Python is done by whoever asks for a batch.

    Two threads that both run Python wait for each other more than they work.
    """

    def __init__(
        self,
        files: Sequence[RunFile],
        index: Index,
        request: ReadRequest,
        progress: Progress,
        unit: Unit,
        partial_step: Callable[[RolloutBatch], None],
        *,
        several_files: bool,
    ) -> None:
        """Plan what is to be read.

        Args:
            files: of the run.
            index: where its steps are.
            request: columns and steps.
            progress: called with what is done and what there is to do.
            unit: in which that is counted.
            partial_step: told of a batch that goes without a column that some of its rows have.
            several_files: rows without a name are named by their file, too.
        """
        self._files, self._index, self._request = tuple(files), index, request
        self._progress, self._unit, self._partial_step = progress, unit, partial_step
        self._several_files = several_files
        numbered = enumerate(index.row_groups)
        plan = [(position, found) for position, found in numbered if found.may_hold(request.steps, request.split)]
        sizes = [found.size(unit) for _, found in plan]
        self._total = sum(sizes)
        self._before = {at: done - size for (at, _), size, done in zip(plan, sizes, accumulate(sizes), strict=True)}
        self._plan: list[list[Positioned]] = list(gathered(plan, files))
        self._finished: set[StepKey] = set()
        self._ahead = ReadAhead(self._read())

    def batches(self) -> Generator[RolloutBatch, None, None]:
        """Yield the batches, once; see `Run.batches`."""
        with SpillFile() as spill, self._ahead as ahead:
            pending = PendingSteps(self._index, spill)
            # No reference to rows or to a batch may be left in this frame, or a step would live on while the next is
            # decoded.
            # The rows of the present row group that are done.
            present, rows_done = -1, 0
            for position, raw in ahead:
                rows = raw.decoded()
                del raw
                for key in self._completed(position, rows, pending):
                    batch = assemble(key, pending.take(key), several_files=self._several_files)
                    if batch.incomplete:
                        self._partial_step(batch)
                    least = LEAST_ROOM if batch.tokens > SMALL else ROOM_FOR_SMALL_STEPS
                    ahead.room = max(least, int(AHEAD * batch.token_columns.nbytes))
                    yield batch
                    del batch
                row_group = self._index.row_groups[position]
                rows_done = min((rows_done if position == present else 0) + rows.count, row_group.rows)
                present = position
                done = self._before[position] + row_group.size(self._unit) * rows_done // row_group.rows
                self._progress(done, self._total)
                del rows
            left = pending.leftover()
            if left is not None:
                raise contradiction(left[1].file, left[0])

    def _read(self) -> Generator[tuple[_Raw, int], None, None]:
        """Decode the planned row groups slice by slice; runs in the reading thread."""
        with row_groups_opened(self._files, self._plan) as opened_groups:
            for row_groups, opened in opened_groups:
                for position, raw in self._slices(row_groups, opened):
                    yield (position, raw), raw.nbytes
                    del raw

    def _slices(self, row_groups: Sequence[Positioned], opened: OpenFile) -> Iterator[_Raw]:
        """Read row groups: several at once, or one slice by slice."""
        if len(row_groups) > 1:
            found = one_slice_of(
                opened, [each for _, each in row_groups], self._request, threads=self._ahead.is_waited_for
            )
            if found is not None:
                yield row_groups[-1][0], found
                return
        for position, row_group in row_groups:
            # A second thread inside the decoder pays only where nothing else is to be done.
            for raw in slices_of(opened, row_group, self._request, threads=lambda: self._ahead.is_waited_for):
                yield position, raw
                del raw

    def _completed(self, position: int, rows: DecodedRows, pending: PendingSteps) -> Iterator[StepKey]:
        """Let the chunks of decoded rows wait for their steps, and yield the steps that are complete."""
        for key in list(rows.chunks):
            chunk = rows.chunks.pop(key)
            if key in self._finished:
                raise contradiction(chunk.file, key)
            is_complete = key in rows.ended and self._index.is_complete(key, position)
            # A chunk that waits for later rows must not keep those of other steps in memory.
            is_view = isinstance(chunk.rows, range) and not is_complete and len(chunk.rows) < rows.count
            pending.add(key, self._index.row_groups[position], chunk.detached() if is_view else chunk)
            del chunk
            if is_complete:
                self._finished.add(key)
                yield key

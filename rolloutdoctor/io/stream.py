"""One pass over the files of a run: a batch for each step asked for, in the order in which they end.

Files are read in slices of some rows: a large row group is several of them, small ones that follow each other are one.
So what is decoded but not yet evaluated is small, whatever the row groups are.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
from rolloutdoctor.io.parquet.index import KEY_COLUMNS, RowGroup, contradiction, count_rows, read_keys, rows_by_key
from rolloutdoctor.io.parquet.step_chunks import ColumnSelection, StepChunk, assemble, decode_chunks
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.io.pending_steps import PendingSteps
from rolloutdoctor.io.progress import Progress, Unit
from rolloutdoctor.io.read_ahead import read_ahead

SLICE_TOKENS = 196_608
"""Tokens of a slice, about."""

_SLICE_BYTES = 2**24
"""Of small row groups that are read together, decoded."""

MOST_OPEN_FILES = 64


@dataclass(frozen=True)
class ReadRequest:
    """Steps and columns of a run to decode.

    Attributes:
        wanted: the columns.
        steps: only these.
        split: only this one; None: both.
        dtype: of float lists.
    """

    wanted: ColumnSelection
    steps: StepRange
    split: str | None
    dtype: torch.dtype

    def __contains__(self, key: StepKey) -> bool:
        return key.step in self.steps and self.split in (None, key.split)


class _Slice(NamedTuple):
    """Adjacent rows of a file as arrow has them.

    Attributes:
        file: its position in the run.
        rows: their numbers in the file.
        table: their columns, under canonical names.
        done: how much of the run was read with them, in the unit of progress.
    """

    file: int
    rows: range
    table: pa.Table
    done: int


def read_steps(
    files: Sequence[RunFile],
    row_groups: Sequence[RowGroup],
    request: ReadRequest,
    progress: Progress,
    unit: Unit,
    partial_step: Callable[[RolloutBatch], None],
    *,
    several_files: bool,
) -> Generator[RolloutBatch, None, None]:
    """Yield the batches of the steps asked for; see `Run.batches`.

    A thread reads slices; they are decoded by whoever asks for a batch: two threads that both run Python wait for each
    other more than they work.

    Args:
        files: of the run.
        row_groups: of the run, in reading order.
        request: columns and steps.
        progress: called with what is done and what there is to do.
        unit: in which that is counted.
        partial_step: called with a batch that goes without a column that some of its rows have.
        several_files: rows without a name are named by their file, too.
    """
    plan = [row_group for row_group in row_groups if row_group.may_hold(request.steps, request.split)]
    total = sum(row_group.size(unit) for row_group in plan)
    missing = {key: count for key, count in count_rows(files, plan).items() if key in request}
    names = (*KEY_COLUMNS, *request.wanted.names)
    with (
        closing(PendingSteps(missing)) as pending,
        closing(read_ahead(_slices(files, plan, names, unit))) as slices,
    ):
        # No reference to rows or to a batch may be left in this frame, or a step would live on while the next is read.
        for number, rows, table, done in slices:
            chunks = _decoded(files[number], rows, table, request, pending.missing)
            del table
            is_shared = len(chunks) > 1
            for key in list(chunks):
                if pending.add(key, number, chunks.pop(key), is_shared=is_shared):
                    batch = assemble(key, pending.take(key), several_files=several_files)
                    if batch.incomplete:
                        partial_step(batch)
                    yield batch
                    del batch
            progress(done, total)
        left = next((key for key, count in pending.missing.items() if count), None)
        if left is not None:
            raise contradiction(files[plan[0].file], left)


def _decoded(
    file: RunFile, rows: range, table: pa.Table, request: ReadRequest, missing: Mapping[StepKey, int]
) -> dict[StepKey, StepChunk]:
    """Check the values of a slice and make tensors of them: a chunk for each step, in the order in which those end."""
    gathered = [each for each in rows_by_key(*read_keys(file, table, rows)) if each[0] in request]
    for key, places in gathered:
        if len(places) > missing.get(key, 0):
            raise contradiction(file, key)
    if not gathered:
        return {}
    order = np.concatenate([places for _, places in gathered])
    if not np.array_equal(order, np.arange(len(rows))):
        # As for scalars: `pa.array` imports pandas wherever it is.
        table = _without_views(table).take(pa.Array.from_buffers(pa.int64(), len(order), [None, pa.py_buffer(order)]))
    counts = [len(places) for _, places in gathered]
    chunks = decode_chunks(file, table, rows.start + order, counts, request.wanted, request.dtype)
    return dict(zip([key for key, _ in gathered], chunks, strict=True))


def _without_views(table: pa.Table) -> pa.Table:
    """Return a table whose texts can be reordered: arrow has no such function for views of text."""
    types = [pa.large_string() if pa.types.is_string_view(field.type) else field.type for field in table.schema]
    return table.cast(pa.schema([field.with_type(type_) for field, type_ in zip(table.schema, types, strict=True)]))


def _slices(
    files: Sequence[RunFile], plan: Sequence[RowGroup], names: Sequence[str], unit: Unit
) -> Generator[_Slice, None, None]:
    """Read the planned row groups slice by slice; runs in the reading thread."""
    done = 0
    opened: dict[int, tuple[ExitStack, OpenFile]] = {}
    with ExitStack() as stack:
        for together in _gathered(plan, files):
            number = together[0].file
            if number not in opened:
                if len(opened) == MOST_OPEN_FILES:
                    opened.pop(next(iter(opened)))[0].close()
                file_stack = stack.enter_context(ExitStack())
                opened[number] = file_stack, file_stack.enter_context(files[number].opened())
            first, rows = together[0].first_row, sum(row_group.rows for row_group in together)
            size = sum(row_group.size(unit) for row_group in together)
            start = 0
            for table in opened[number][1].slices([row_group.group for row_group in together], names, SLICE_TOKENS):
                stop = start + table.num_rows
                slices = [_Slice(number, range(first + start, first + stop), table, done + size * stop // rows)]
                # No reference may be left in this frame: a column may go while the next slice is decoded.
                del table
                yield slices.pop()
                start = stop
            done += size


def _gathered(plan: Sequence[RowGroup], files: Sequence[RunFile]) -> Iterator[list[RowGroup]]:
    """Gather small row groups that follow each other in a file, up to a slice: none costs calls of its own."""
    together: list[RowGroup] = []
    values = size = 0
    for row_group in plan:
        chunks = files[row_group.file].chunks[row_group.group]
        most, held = max(chunk.values for chunk in chunks), sum(chunk.uncompressed for chunk in chunks)
        follows = together and together[-1].file == row_group.file and together[-1].numbers.stop == row_group.first_row
        if not (follows and values + most <= SLICE_TOKENS and size + held <= _SLICE_BYTES):
            if together:
                yield together
            together, values, size = [], 0, 0
        together.append(row_group)
        values, size = values + most, size + held
    if together:
        yield together

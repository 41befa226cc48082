"""Row groups a slice at a time: what is decoded but not yet evaluated is small, whatever the file's row groups.

A large row group is several slices; small ones that follow each other are one.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
from rolloutdoctor.io.parquet.index import KEY_COLUMNS, RowGroup, are_of, contradiction, read_keys, rows_by_key
from rolloutdoctor.io.parquet.step_chunks import ColumnSelection, StepChunk, decode_chunk, decode_steps
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.results.errors import DataError

SLICE_TOKENS = 196_608
"""Tokens of a slice, about."""

_MOST_TURNS = 4
"""So many times longer are slices where the rows of that many steps take turns: each has few rows of a step."""


@dataclass(frozen=True)
class ReadRequest:
    """What of a run is to be decoded.

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


@dataclass(frozen=True)
class DecodedRows:
    """Some adjacent rows of a file, decoded.

    Attributes:
        count: how many they are.
        chunks: what they hold of the steps asked for, in the order in which those end.
        ended: steps and splits of which the row groups have no more rows.
    """

    count: int
    chunks: dict[StepKey, StepChunk]
    ended: frozenset[StepKey]


_Rows = range | np.ndarray
"""Numbers of rows, ascending."""


@dataclass(frozen=True)
class ArrowRows:
    """Some adjacent rows of a file as arrow has them: what is left to do takes Python, which one thread has.

    Attributes:
        request: what they were read for.
        file: that they are in.
        table: their columns, under their canonical names.
        first: number in the file of the first of them.
        rows: numbers in the file of those asked for, by step and split, in the order in which those end.
        ended: steps and splits of which the row groups have no more rows.
        stated: step and split, and numbers in the file, of the rows of which the footer says them; none: the rows do.
    """

    request: ReadRequest
    file: RunFile
    table: pa.Table
    first: int
    rows: dict[StepKey, _Rows]
    ended: frozenset[StepKey]
    stated: Sequence[tuple[StepKey, range]] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its columns."""
        return int(self.table.nbytes)

    def decoded(self) -> DecodedRows:
        """Check the values, and make tensors of them.

        Raises:
            DataError: if a value breaks the contract of its column.
            InputError: if the rows are of another step than the footer says.
        """
        chunks = self._decoded_at_once()
        if chunks is None:
            for key, rows in self.stated:
                if not are_of(self.file, _taken(self.table, rows, self.first), [(key, rows)]):
                    raise contradiction(self.file, key)
            wanted, dtype = self.request.wanted, self.request.dtype
            chunks = {
                key: decode_chunk(self.file, _taken(self.table, rows, self.first), rows, wanted, dtype)
                for key, rows in self.rows.items()
            }
        return DecodedRows(self.table.num_rows, chunks, self.ended)

    def _decoded_at_once(self) -> dict[StepKey, StepChunk] | None:
        """The chunks of several steps; None where each has to be decoded alone, as it has if something is wrong."""
        parts = [rows for rows in self.rows.values() if isinstance(rows, range)]
        if len(parts) < max(2, len(self.rows)) or sum(map(len, parts)) < self.table.num_rows:
            return None
        try:
            if self.stated and not are_of(self.file, self.table, self.stated):
                return None
            found = decode_steps(self.file, self.table, parts, self.request.wanted, self.request.dtype)
        except DataError:
            return None
        return None if found is None else dict(zip(self.rows, found, strict=True))


def slices_of(
    opened: OpenFile, row_group: RowGroup, request: ReadRequest, *, threads: Callable[[], bool]
) -> Iterator[ArrowRows]:
    """Read what a row group holds of the steps asked for.

    Args:
        opened: the file that it is in.
        row_group: to go through.
        request: columns and steps.
        threads: asked before each slice whether several columns are decoded at a time.

    Raises:
        DataError: if a step or a split is not valid.
        InputError: if the file is damaged.
    """
    file, first = opened.file, row_group.first_row
    only = row_group.only
    if only is not None:
        gathered: list[tuple[StepKey, _Rows]] = [(only, range(row_group.rows))]
        names: tuple[str, ...] = (*KEY_COLUMNS, *request.wanted.names)
    else:
        keys = opened.read(row_group.group, KEY_COLUMNS)
        gathered = rows_by_key(*read_keys(file, keys, range(first, first + row_group.rows)))
        names = request.wanted.names or KEY_COLUMNS
    chosen = [(key, rows) for key, rows in gathered if key in request]
    take_turns = any(not isinstance(rows, range) for _, rows in chosen)
    tokens = SLICE_TOKENS * (min(len(chosen), _MOST_TURNS) if take_turns else 1)
    ahead = deque(sorted(chosen, key=lambda entry: entry[1][0]))
    here: list[tuple[StepKey, _Rows]] = []
    start = 0
    for table in opened.slices(row_group.group, names, tokens, threads=threads):
        stop = start + table.num_rows
        while ahead and ahead[0][1][0] < stop:
            here.append(ahead.popleft())
        here.sort(key=lambda entry: entry[1][-1])
        rows_here = {key: _shifted(part, first) for key, rows in here if len(part := _between(rows, start, stop))}
        ended = frozenset(key for key, rows in here if rows[-1] < stop)
        stated = () if only is None else ((only, range(first + start, first + stop)),)
        found = [ArrowRows(request, file, table, first + start, rows_here, ended, stated)]
        # No reference may be left in this frame: a column may go while the next slice is decoded.
        del table
        yield found.pop()
        here = [(key, rows) for key, rows in here if rows[-1] >= stop]
        start = stop


def one_slice_of(
    opened: OpenFile, row_groups: Sequence[RowGroup], request: ReadRequest, *, threads: bool
) -> ArrowRows | None:
    """Read what small row groups hold of the steps asked for.

    Args:
        opened: the file that they are in.
        row_groups: as `gathered` finds them, each of one step asked for.
        request: columns and steps.
        threads: several columns are decoded at a time.

    Returns:
        Their rows; None if a row group is damaged: read one by one, they tell which.
    """
    names = (*KEY_COLUMNS, *request.wanted.names)
    table = opened.read_together([each.group for each in row_groups], names, threads=threads)
    if table is None:
        return None
    stated: dict[StepKey, range] = {}
    for each in row_groups:
        assert each.only is not None
        here = range(each.first_row, each.first_row + each.rows)
        stated[each.only] = range(stated.get(each.only, here).start, here.stop)
    first = row_groups[0].first_row
    return ArrowRows(request, opened.file, table, first, {**stated}, frozenset(stated), tuple(stated.items()))


def _between(rows: _Rows, start: int, stop: int) -> _Rows:
    """Those of some numbers that are from `start` on and before `stop`."""
    if isinstance(rows, range):
        return range(max(rows.start, start), max(min(rows.stop, stop), rows.start, start))
    low, high = np.searchsorted(rows, [start, stop])
    return rows[low:high]


def _shifted(rows: _Rows, by: int) -> _Rows:
    return range(rows.start + by, rows.stop + by) if isinstance(rows, range) else rows + by


def _taken(table: pa.Table, rows: _Rows, start: int) -> pa.Table:
    """Some rows of a table of which the first is number `start`; adjacent ones share its memory."""
    if isinstance(rows, range):
        return table.slice(rows.start - start, len(rows))
    places = np.ascontiguousarray(rows - start, np.int64)
    # As for scalars: `pa.array` imports pandas wherever it is.
    return table.take(pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)]))

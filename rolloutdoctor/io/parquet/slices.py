"""A row group some rows at a time: what is decoded but not yet evaluated is small, whatever the file's row groups."""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import pyarrow as pa
import torch

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
from rolloutdoctor.io.parquet.index import KEY_COLUMNS, RowGroup, check_key, read_keys, rows_by_key
from rolloutdoctor.io.parquet.step_chunks import Piece, Wanted, decode_piece
from rolloutdoctor.io.parquet.steps import StepRange

SLICE_TOKENS = 196_608
"""Tokens of a slice, about."""

_HEAD = 8
"""So many times longer are slices of heads: a value of a mask is small."""

_MOST_TURNS = 4
"""So many times longer are slices where the rows of that many steps take turns: each has few rows of a step."""


class Share(Enum):
    """Which columns of a row group are read together."""

    ALL = "all"
    HEAD = "head"
    REST = "rest"


@dataclass(frozen=True)
class Asked:
    """What of a run is to be decoded.

    Attributes:
        wanted: the columns.
        steps: only these.
        split: only this one; None: both.
        dtype: of float lists.
        share: what part of the columns of a step `wanted` is; what is the rest comes when the head was checked.
    """

    wanted: Wanted
    steps: StepRange
    split: str | None
    dtype: torch.dtype
    share: Share = Share.ALL

    @property
    def head(self) -> "Asked":
        """The same, of it what has to be known before the tokens are gone over."""
        return replace(self, wanted=self.wanted.head, share=Share.HEAD)

    @property
    def rest(self) -> "Asked":
        """The same, of it what the head leaves."""
        return replace(self, wanted=self.wanted.rest, share=Share.REST)

    def __contains__(self, key: StepKey) -> bool:
        return key.step in self.steps and self.split in (None, key.split)


@dataclass(frozen=True)
class Slice:
    """Some adjacent rows of a row group, decoded.

    Attributes:
        rows: how many they are.
        pieces: what they hold of the steps asked for, in the order in which those end.
        ended: steps and splits of which the row group has no more rows.
        is_whole: whether nothing that was asked for of these rows is to be read later.
    """

    rows: int
    pieces: dict[StepKey, Piece]
    ended: frozenset[StepKey]
    is_whole: bool

    @property
    def held(self) -> int:
        """Bytes of its token values."""
        return sum(piece.held for piece in self.pieces.values())

    def glanced(self, names: Callable[[str], Collection[str]]) -> "Slice":
        """Return the slice without the values of some token columns, given by split."""
        pieces = {key: piece.glanced(found) for key, piece in self.pieces.items() if (found := names(key.split))}
        return replace(self, pieces=self.pieces | pieces) if pieces else self


_Rows = range | np.ndarray
"""Numbers of rows, ascending."""


@dataclass(frozen=True)
class RawSlice:
    """Some adjacent rows of a row group as arrow has them: what is left to do takes Python, which one thread has.

    Attributes:
        asked: what they were read for.
        file: that they are in.
        table: their columns, under their canonical names.
        first: number in the file of the first of them.
        rows: numbers in the file of those asked for, by step and split, in the order in which those end.
        ended: steps and splits of which the row group has no more rows.
        only: the step and split that all of them are of, as the footer says; None: rows or head have told.
    """

    asked: Asked
    file: RunFile
    table: pa.Table
    first: int
    rows: dict[StepKey, _Rows]
    ended: frozenset[StepKey]
    only: StepKey | None

    @property
    def held(self) -> int:
        """Bytes of its columns."""
        return int(self.table.nbytes)

    def decoded(self, lengths: np.ndarray | None = None) -> Slice:
        """Check the values, and make tensors of them.

        Args:
            lengths: ``[N]`` tokens of the rows, where they are the rest of what was read before.

        Raises:
            DataError: if a value breaks the contract of its column.
            InputError: if the rows are of another step than the footer says.
        """
        if self.only is not None:
            check_key(self.file, self.table, range(self.first, self.first + self.table.num_rows), self.only)
        wanted, dtype = self.asked.wanted, self.asked.dtype
        pieces = {
            key: decode_piece(self.file, _taken(self.table, rows, self.first), rows, wanted, dtype, lengths)
            for key, rows in self.rows.items()
        }
        return Slice(self.table.num_rows, pieces, self.ended, self.asked.share is not Share.HEAD)


def slices_of(
    opened: OpenFile, row_group: RowGroup, asked: Asked, *, threads: Callable[[], bool]
) -> Iterator[RawSlice]:
    """Read what a row group holds of the steps asked for.

    Args:
        opened: the file that it is in.
        row_group: to go through.
        asked: columns and steps.
        threads: asked before each slice whether several columns are decoded at a time.

    Raises:
        DataError: if a step or a split is not valid.
        InputError: if the file is damaged.
    """
    file, first = opened.file, row_group.first_row
    # The keys of the rest of a step were checked with its head.
    only = None if asked.share is Share.REST else row_group.only
    if row_group.only is not None:
        gathered: list[tuple[StepKey, _Rows]] = [(row_group.only, range(row_group.rows))]
        names = asked.wanted.names if only is None else (*KEY_COLUMNS, *asked.wanted.names)
    else:
        keys = opened.read(row_group.group, KEY_COLUMNS)
        gathered = rows_by_key(*read_keys(file, keys, range(first, first + row_group.rows)))
        names = asked.wanted.names or KEY_COLUMNS
    chosen = [(key, rows) for key, rows in gathered if key in asked]
    take_turns = any(not isinstance(rows, range) for _, rows in chosen)
    tokens = SLICE_TOKENS * (min(len(chosen), _MOST_TURNS) if take_turns else 1)
    if asked.share is Share.HEAD:
        tokens *= _HEAD
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
        found = [RawSlice(asked, file, table, first + start, rows_here, ended, only)]
        # No reference may be left in this frame: a column may go while the next slice is decoded.
        del table
        yield found.pop()
        here = [(key, rows) for key, rows in here if rows[-1] >= stop]
        start = stop


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
    return table.take(pa.array(rows - start))

"""Steps that are gone over while they are read: of each the head first, the other token columns as they are asked for.

So no more of a step has to be in memory than its head and what is being worked on. It takes a step of which the row
groups have no other rows, and footers that leave no doubt that every token column is there.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.data.token_columns import Glance
from rolloutdoctor.io.parquet import slices
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.index import RowGroup, contradiction
from rolloutdoctor.io.parquet.slices import Asked, RawSlice, Slice
from rolloutdoctor.io.parquet.step_chunks import MASK, Wanted

_LEAST_SLICES = 3
"""A step of fewer is not worth reading in two goes."""


class Task(NamedTuple):
    """A row group to be read.

    Attributes:
        position: in the index.
        row_group: itself.
        asked: what of it.
    """

    position: int
    row_group: RowGroup
    asked: Asked


def tasks_of(files: Sequence[RunFile], plan: Sequence[tuple[int, RowGroup]], asked: Asked) -> list[Task]:
    """Put in order what is to be read: row groups in turn, those of a step that arrives once for its head, then again.

    Args:
        files: of the run.
        plan: positions in the index and row groups that may hold what is asked for, in reading order.
        asked: columns and steps.
    """
    may_arrive = _Judge(files, plan, asked.wanted)
    found: list[Task] = []
    for key, entries in groupby(plan, key=lambda entry: entry[1].only):
        here = list(entries)
        goes = (asked.head, asked.rest) if key is not None and may_arrive(key, [each for _, each in here]) else (asked,)
        found += [Task(*entry, one) for one in goes for entry in here]
    return found


class _Judge:
    """Tells whether a step can be gone over while it is read."""

    def __init__(self, files: Sequence[RunFile], plan: Sequence[tuple[int, RowGroup]], wanted: Wanted) -> None:
        self._files = files
        self._rest = wanted.rest.tokens if MASK in wanted.tokens else ()
        self._counts = Counter(found.only for _, found in plan)
        # Of a row group with rows of several steps, only its ends are in others, unless all its steps are known.
        mixed = [found for _, found in plan if found.only is None]
        self._mixed = set(chain.from_iterable(found.keys or _ends(found) for found in mixed))

    def __call__(self, key: StepKey, row_groups: Sequence[RowGroup]) -> bool:
        places = [(found.file, found.group) for found in row_groups]
        if not self._rest or key in self._mixed or self._counts[key] > len(row_groups) or places != sorted(places):
            return False
        masks = [self._values(found, MASK) for found in row_groups]
        if sum(masks) < _LEAST_SLICES * slices.SLICE_TOKENS:
            return False
        return all(self._is_filled(found, values) for found, values in zip(row_groups, masks, strict=True))

    def _is_filled(self, row_group: RowGroup, values: int) -> bool:
        """True if all token columns have as many values as the mask, and surely some; an empty row counts as one."""
        # A column of nulls has a value for each row.
        return values > row_group.rows and all(self._values(row_group, name) == values for name in self._rest)

    def _values(self, row_group: RowGroup, name: str) -> int:
        """Values of a column, as the footer says; 0 if it leaves a doubt which leaf is the column's."""
        file = self._files[row_group.file]
        leaves = file.leaves.get(file.columns[name].stored, [])
        return file.chunks[row_group.group][leaves[0]].values if len(leaves) == 1 else 0


def _ends(row_group: RowGroup) -> Iterator[StepKey]:
    return (StepKey(step, split) for step in (row_group.low, row_group.high) for split in row_group.splits)


class Rest:
    """The token columns of a step beside its mask, slice by slice."""

    def __init__(
        self,
        key: StepKey,
        lengths: np.ndarray,
        parts: Iterator[tuple[int, Slice | RawSlice]],
        seen: Callable[[Slice], Slice],
    ) -> None:
        """Take what comes next.

        Args:
            key: step and split.
            lengths: ``[N]`` tokens of its rows, of which one has some.
            parts: the slices of the run, of which the next ones are those.
            seen: called with each.
        """
        self._key, self._lengths, self._parts, self._seen = key, lengths, parts, seen
        self._row = 0
        # Rows up to the last one that is not empty.
        self._filled = int(np.flatnonzero(lengths)[-1]) + 1
        self._failure: Exception | None = None

    def more(self) -> dict[str, Tensor | Glance]:
        """Decode the next slice: column to ``[T]`` values, or what is known of them.

        Raises:
            DataError: if a value breaks the contract of its column, or lists of one row differ in length.
            InputError: if the file is damaged.
        """
        if self._failure is not None:
            raise self._failure
        try:
            found = self._next()
            # Nobody waits for slices without a token, and they would be there when the next step is asked for.
            while self._filled <= self._row < len(self._lengths):
                self._next()
            return found
        except Exception as error:
            # Nothing comes after it, whoever asks once more.
            self._failure = error
            raise

    def _next(self) -> dict[str, Tensor | Glance]:
        _, part = next(self._parts)
        assert isinstance(part, RawSlice)  # what was read for a rest is finished here
        rows = part.table.num_rows
        lengths = self._lengths[self._row : self._row + rows]
        if len(lengths) < rows:
            raise contradiction(part.file, self._key)
        self._row += rows
        found = self._seen(part.decoded(lengths)).pieces[self._key].tokens
        return {name: values for name, values in found.items() if isinstance(values, Tensor | Glance)}

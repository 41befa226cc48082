"""Where each step lives: which row groups hold it, and after which of them it is complete."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from rolloutdoctor.data.batch import EVAL, TRAIN, StepKey
from rolloutdoctor.io.parquet.decode import Place, evals, step_numbers
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.io.parquet.token_counts import response_tokens
from rolloutdoctor.io.progress import Unit
from rolloutdoctor.results.errors import InputError

KEY_COLUMNS = ("step", "split")


@dataclass(frozen=True)
class RowGroup:
    """One row group that has rows.

    Attributes:
        file: position of its file in the run.
        group: its number in the file.
        first_row: number in the file of its first row.
        rows: how many it has.
        low, high: smallest and largest step in it.
        splits: the splits in it.
        keys: the steps and splits in it, or None if only their range is known.
        tokens: of its responses, from the footer.
    """

    file: int
    group: int
    first_row: int
    rows: int
    low: int
    high: int
    splits: frozenset[str]
    keys: tuple[StepKey, ...] | None = None
    tokens: int = 0

    def size(self, unit: Unit) -> int:
        """How many tokens, or rows, it has."""
        return self.tokens if unit == "tokens" else self.rows

    @property
    def only(self) -> StepKey | None:
        """The step and split that all its rows are of; None if there are several."""
        if self.low < self.high or len(self.splits) > 1:
            return None
        return StepKey(self.low, next(iter(self.splits)))

    def may_hold(self, steps: StepRange, split: str | None) -> bool:
        """Tell whether a row of these steps and this split can be in it."""
        if self.keys is not None:
            return any(key.step in steps and split in (None, key.split) for key in self.keys)
        return steps.meets(self.low, self.high) and (split is None or split in self.splits)


@dataclass(frozen=True)
class Index:
    """The row groups of a run in reading order: files in turn where steps are scattered over them.

    Attributes:
        row_groups: those that have rows.
        last: step and split to the position of the last row group that holds it; what is not in it is all in one.
    """

    row_groups: tuple[RowGroup, ...]
    last: Mapping[StepKey, int]

    def is_complete(self, key: StepKey, position: int) -> bool:
        """Tell whether all rows of `key` have been seen after the row group at `position`."""
        return self.last.get(key, position) <= position


def build_index(files: Sequence[RunFile]) -> Index:
    """Find the row groups of every step, from their statistics where those settle it, else from `step` and `split`.

    Raises:
        DataError: if a step or a split is not valid.
        InputError: if a file cannot be read.
    """
    return _from_statistics(files) or _from_rows(files)


def index_of(ordered: Sequence[RowGroup]) -> Index:
    """Index row groups that are in reading order; where only ranges are known, they overlap in their ends at most."""
    last: dict[StepKey, int] = {}
    for position, found in enumerate(ordered):
        ends = (StepKey(step, split) for split in found.splits for step in (found.low, found.high))
        last.update(dict.fromkeys(ends if found.keys is None else found.keys, position))
    return Index(tuple(ordered), last)


def in_reading_order(row_groups: Sequence[RowGroup]) -> tuple[RowGroup, ...]:
    """Put the row groups of several files in the order of their steps, so that a step's rows are read together.

    Each file keeps its own order, whatever the steps in it; files of which one ends where the next begins do, too.
    """
    highest: dict[int, int] = {}
    order = []
    for place, found in enumerate(row_groups):
        highest[found.file] = max(found.low, highest.get(found.file, 0))
        order.append((highest[found.file], place))
    return tuple(row_groups[place] for _, place in sorted(order))


def read_keys(file: RunFile, table: pa.Table, rows: range) -> tuple[np.ndarray, np.ndarray | None]:
    """Decode `step` and `split` of a row group.

    Args:
        file: that it is of.
        table: its columns under their canonical names.
        rows: numbers of its rows in the file.

    Returns:
        ``[N]`` int64 steps, and ``[N]`` bool that is True for eval rows; None if the file has no `split`: all train.

    Raises:
        DataError: if a value breaks the contract.
    """
    steps_N = step_numbers(table.column("step"), Place(file.name, file.columns["step"].label, rows))
    if "split" not in file.columns:
        return steps_N, None
    return steps_N, evals(table.column("split"), Place(file.name, file.columns["split"].label, rows))


def are_of(file: RunFile, table: pa.Table, stated: Sequence[tuple[StepKey, range]]) -> bool:
    """Tell whether rows are of the steps and splits that the footer says they are of.

    Args:
        file: that they are in.
        table: their columns under their canonical names.
        stated: steps and splits, and numbers in the file of the rows of each; together they are those of the table.

    Raises:
        DataError: if a value breaks the contract.
    """
    steps_N, is_eval_N = read_keys(file, table, range(stated[0][1].start, stated[-1][1].stop))
    counts = [len(rows) for _, rows in stated]
    if (steps_N != np.repeat([key.step for key, _ in stated], counts)).any():
        return False
    return is_eval_N is None or not (is_eval_N != np.repeat([key.split == EVAL for key, _ in stated], counts)).any()


def contradiction(file: RunFile, key: StepKey) -> InputError:
    """Return the error for statistics that are not those of the rows."""
    return InputError(
        f"{file.name}: the statistics in the footer contradict the rows of step {key.step}; write the file again, "
        "and leave it alone while it is read"
    )


def rows_by_key(steps_N: np.ndarray, is_eval_N: np.ndarray | None) -> list[tuple[StepKey, "range | np.ndarray"]]:
    """Gather rows by step and split, in the order in which each ends.

    Args:
        steps_N: ``[N]`` int64.
        is_eval_N: ``[N]`` bool; None: all train.

    Returns:
        Pairs of a key and its rows in file order: a range where they are adjacent, else an index array.
    """
    if not len(steps_N):
        return []
    codes_N = np.zeros(len(steps_N), np.int64)
    steps: np.ndarray = steps_N[:1]
    if (steps_N != steps_N[0]).any():
        steps, codes_N = np.unique(steps_N, return_inverse=True)
    codes_N = 2 * codes_N if is_eval_N is None else 2 * codes_N + is_eval_N
    order_N = np.argsort(codes_N, kind="stable")
    cuts = np.flatnonzero(np.diff(codes_N[order_N])) + 1
    gathered = []
    for rows in np.split(order_N, cuts):
        code, first, end = int(codes_N[rows[0]]), int(rows[0]), int(rows[-1]) + 1
        key = StepKey(int(steps[code // 2]), EVAL if code % 2 else TRAIN)
        gathered.append((end, key, range(first, end) if end - first == len(rows) else rows))
    return [(key, rows) for _, key, rows in sorted(gathered, key=lambda entry: entry[0])]


def _from_statistics(files: Sequence[RunFile]) -> Index | None:
    """Return the index if the footers alone tell it exactly.

    They do if no two row groups of one split overlap in more than an end of their ranges: then a step inside a range
    is in that row group only, and one at an end is in every row group whose range ends there.
    """
    row_groups: list[RowGroup] = []
    for position, file in enumerate(files):
        ranges = _Statistics(file)
        for group, first_row, rows in _numbered(file):
            steps, splits, tokens = ranges.steps(group), ranges.splits(group), response_tokens(file, group)
            if steps is None or splits is None:
                return None
            row_groups.append(RowGroup(position, group, first_row, rows, *steps, splits, tokens=tokens))
    for split in (TRAIN, EVAL):
        spans = sorted((found.low, found.high) for found in row_groups if split in found.splits)
        if any(after[0] < before[1] for before, after in pairwise(spans)):
            return None
    ordered = in_reading_order(row_groups)
    return index_of(ordered)


def _from_rows(files: Sequence[RunFile]) -> Index:
    row_groups: list[RowGroup] = []
    # One object for a key, however many row groups it is in.
    known: dict[StepKey, StepKey] = {}
    for position, file in enumerate(files):
        with file.opened() as opened:
            for group, first_row, rows in _numbered(file):
                table = opened.read(group, KEY_COLUMNS)
                found = rows_by_key(*read_keys(file, table, range(first_row, first_row + rows)))
                keys = tuple(known.setdefault(key, key) for key, _ in found)
                low, high = min(key.step for key in keys), max(key.step for key in keys)
                splits, tokens = frozenset(key.split for key in keys), response_tokens(file, group)
                row_groups.append(RowGroup(position, group, first_row, rows, low, high, splits, keys, tokens))
    ordered = in_reading_order(row_groups)
    return index_of(ordered)


def _numbered(file: RunFile) -> Iterator[tuple[int, int, int]]:
    """Yield number, first row and row count of every row group that has rows."""
    first_row = 0
    for group, rows in enumerate(file.row_group_rows()):
        if rows:
            yield group, first_row, rows
        first_row += rows


class _Statistics:
    """Row-group statistics of `step` and `split`, where they can be relied on."""

    def __init__(self, file: RunFile) -> None:
        self._file = file
        self._step = _leaf(file, "step")
        self._has_split = "split" in file.columns
        self._split = _leaf(file, "split") if self._has_split else None

    def steps(self, group: int) -> tuple[int, int] | None:
        low, high = (self._number(end) for end in self._ends(group, self._step) or (b"", b""))
        return (low, high) if low is not None and high is not None and 0 <= low <= high < 2**63 else None

    def splits(self, group: int) -> frozenset[str] | None:
        if not self._has_split:
            return frozenset({TRAIN})
        low, high = self._ends(group, self._split) or (b"", b"")
        return frozenset({low.decode()}) if low == high and low in (TRAIN.encode(), EVAL.encode()) else None

    def _ends(self, group: int, leaf: int | None) -> tuple[bytes, bytes] | None:
        return None if leaf is None else self._file.chunks[group][leaf].ends

    def _number(self, end: bytes) -> int | None:
        """What an integer column stores in so many bytes; None if its width is another."""
        column = self._file.footer.schema.column(self._step)
        if len(end) != {"INT32": 4, "INT64": 8}.get(column.physical_type):
            return None
        is_unsigned = pa.types.is_unsigned_integer(self._file.columns["step"].type)
        return int.from_bytes(end, "little", signed=not is_unsigned)


def _leaf(file: RunFile, column: str) -> int | None:
    """The leaf of a column that is no list and no struct."""
    leaves = file.leaves.get(file.columns[column].stored, ())
    return leaves[0] if len(leaves) == 1 else None

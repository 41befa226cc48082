"""Index of the steps that each row group holds, and of the rows of each step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.io.parquet.cells import Place, evals, step_numbers
from rolloutdoctor.io.parquet.files import OpenFile, RunFile
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
        tokens: of its responses, from the footer.
    """

    file: int
    group: int
    first_row: int
    rows: int
    low: int
    high: int
    splits: frozenset[str]
    tokens: int = 0

    def size(self, unit: Unit) -> int:
        """Return the number of tokens, or of rows."""
        return self.tokens if unit == "tokens" else self.rows

    @property
    def numbers(self) -> range:
        """Numbers of its rows in the file."""
        return range(self.first_row, self.first_row + self.rows)

    @property
    def only(self) -> StepKey | None:
        """The step and split that all its rows are of; None if there are several."""
        if self.low < self.high or len(self.splits) > 1:
            return None
        return StepKey(self.low, next(iter(self.splits)))

    def may_hold(self, steps: StepRange, split: str | None) -> bool:
        """Tell whether a row of these steps and this split can be in it."""
        return steps.meets(self.low, self.high) and (split is None or split in self.splits)


def build_index(files: Sequence[RunFile]) -> tuple[RowGroup, ...]:
    """Find the steps of every row group, from its statistics or else from its rows, and put them in reading order.

    Raises:
        DataError: if a step or a split is not valid.
        InputError: if a file cannot be read.
    """
    row_groups: list[RowGroup] = []
    for position, file in enumerate(files):
        statistics = _Statistics(file)
        with ExitStack() as stack:
            opened: OpenFile | None = None
            for group, first_row, rows in _numbered(file):
                ends, splits = statistics.steps(group), statistics.splits(group)
                if ends is None or splits is None:
                    opened = opened or stack.enter_context(file.opened())
                    keys = [key for key, _ in keys_of(opened, group, range(first_row, first_row + rows))]
                    ends = min(key.step for key in keys), max(key.step for key in keys)
                    splits = frozenset(key.split for key in keys)
                row_groups.append(
                    RowGroup(position, group, first_row, rows, *ends, splits, response_tokens(file, group))
                )
    return in_reading_order(row_groups)


def count_rows(files: Sequence[RunFile], row_groups: Sequence[RowGroup]) -> Counter[StepKey]:
    """Count the rows of every step and split in some row groups; those of several steps are read.

    Raises:
        DataError: if a step or a split is not valid.
        InputError: if a file cannot be read.
    """
    counts: Counter[StepKey] = Counter()
    unclear: dict[int, list[RowGroup]] = {}
    for row_group in row_groups:
        if row_group.only is None:
            unclear.setdefault(row_group.file, []).append(row_group)
        else:
            counts[row_group.only] += row_group.rows
    for number, several in unclear.items():
        with files[number].opened() as opened:
            for row_group in several:
                counts.update({key: len(rows) for key, rows in keys_of(opened, row_group.group, row_group.numbers)})
    return counts


def in_reading_order(row_groups: Sequence[RowGroup]) -> tuple[RowGroup, ...]:
    """Put the row groups of several files in the order of their steps, so that a step's rows are read together.

    Each file keeps its own order, whatever the steps in it; files of which one ends where the next begins do, too.
    """
    highest: dict[int, int] = {}
    order = []
    for place, row_group in enumerate(row_groups):
        highest[row_group.file] = max(row_group.low, highest.get(row_group.file, 0))
        order.append((highest[row_group.file], place))
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


def keys_of(opened: OpenFile, group: int, rows: range) -> list[tuple[StepKey, np.ndarray]]:
    """Read the steps and splits of a row group, as `rows_by_key` gathers them.

    Args:
        opened: the file that it is in.
        group: its number.
        rows: numbers of its rows in the file.
    """
    return rows_by_key(*read_keys(opened.file, opened.read(group, KEY_COLUMNS), rows))


def contradiction(file: RunFile, key: StepKey) -> InputError:
    """Return the error for statistics that are not those of the rows."""
    return InputError(
        f"{file.name}: the statistics in the footer contradict the rows of step {key.step}; write the file again, "
        "and leave it alone while it is read"
    )


def rows_by_key(steps_N: np.ndarray, is_eval_N: np.ndarray | None) -> list[tuple[StepKey, np.ndarray]]:
    """Gather rows by step and split, in the order in which each ends.

    Args:
        steps_N: ``[N]`` int64.
        is_eval_N: ``[N]`` bool; None: all train.

    Returns:
        Pairs of a key and its rows in file order.
    """
    if not len(steps_N):
        return []
    steps, codes_N = np.unique(steps_N, return_inverse=True)
    codes_N = 2 * codes_N if is_eval_N is None else 2 * codes_N + is_eval_N
    order_N = np.argsort(codes_N, kind="stable")
    gathered = []
    for rows in np.split(order_N, np.flatnonzero(np.diff(codes_N[order_N])) + 1):
        code = int(codes_N[rows[0]])
        gathered.append((StepKey(int(steps[code // 2]), EVAL if code % 2 else TRAIN), rows))
    return sorted(gathered, key=lambda entry: int(entry[1][-1]))


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
        """Decode a bound of an integer column from its bytes; None if their number is not its width."""
        column = self._file.footer.schema.column(self._step)
        if len(end) != {"INT32": 4, "INT64": 8}.get(column.physical_type):
            return None
        is_unsigned = pa.types.is_unsigned_integer(self._file.columns["step"].type)
        return int.from_bytes(end, "little", signed=not is_unsigned)


def _leaf(file: RunFile, column: str) -> int | None:
    """The leaf of a column that is no list and no struct."""
    leaves = file.leaves.get(file.columns[column].stored, ())
    return leaves[0] if len(leaves) == 1 else None

"""Rows as a recorder has them, in NumPy arrays, and the Arrow table of them that enters a journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rolloutdoctor.io.write.run_table import run_table


@dataclass(frozen=True)
class Lists:
    """Cells of a token column.

    Attributes:
        values: of all rows, one after another; float32, int32 or uint8.
        offsets: ``[N + 1]`` int32, where the values of each row begin.
    """

    values: np.ndarray
    offsets: np.ndarray

    def arrow(self) -> pa.ListArray:
        """View them as Arrow has them."""
        return pa.ListArray.from_arrays(pa.array(self.offsets), pa.array(self.values))


Cells = Sequence[object] | np.ndarray | Lists | Mapping[str, np.ndarray]
"""Of one column: Python values; ``[N]`` numbers; lists; or ``[N]`` float64 by name, of which NaN is null."""


def rows_table(parts: Sequence[Mapping[str, Cells]]) -> pa.Table:
    """Make the table of the rows of one step.

    Args:
        parts: canonical columns; the parts follow one another.

    Raises:
        SchemaError, DataError: as `run_table` does.
    """
    tables = [run_table({name: _arrow(cells) for name, cells in part.items()}, where="the journal") for part in parts]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def named_numbers(cells: Mapping[str, np.ndarray]) -> pa.StructArray:
    """Float64 by name as Arrow has them; NaN is null."""
    arrays = [pa.array(each, pa.float64(), from_pandas=True) for each in cells.values()]
    return pa.StructArray.from_arrays(arrays, names=list(cells))


def _arrow(cells: Cells) -> "Sequence[object] | pa.Array":
    if isinstance(cells, Lists):
        return cells.arrow()
    if isinstance(cells, Mapping):
        return named_numbers(cells)
    return pa.array(cells) if isinstance(cells, np.ndarray) else cells

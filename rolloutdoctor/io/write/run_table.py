"""Rows that someone brings, as an Arrow table of the contract's columns: checked, or refused with a sentence."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from rolloutdoctor.data.schema import BY_NAME, COLUMNS
from rolloutdoctor.io.write.arrow_types import arrow_type, to_arrow
from rolloutdoctor.results.errors import DataError, SchemaError, nearest

Rows = Sequence[Mapping[str, object]] | Mapping[str, Sequence[object]]


def by_column(rows: Rows) -> dict[str, Sequence[object]]:
    """Turn a list of records, or one sequence of cells for each column, into the latter."""
    if isinstance(rows, Mapping):
        return dict(rows)
    names = {name: None for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in names}


def run_table(
    columns: Mapping[str, Sequence[object]], schema: pa.Schema | None = None, *, where: str, first_row: int = 0
) -> pa.Table:
    """Build the table of some rows.

    Args:
        columns: cells by canonical name: Python or NumPy values, or Arrow arrays.
        schema: of the rows before these; None: they are the first.
        where: what messages call the place that the rows go to.
        first_row: how many rows there were before, for messages.

    Raises:
        SchemaError: if a column is unknown, or `schema` has others.
        DataError: if a cell does not fit its column, or the token columns of a row differ in length.
    """
    for name in columns:
        if name not in BY_NAME:
            raise SchemaError(f"{where}: no column is called {name!r}{nearest(name, list(BY_NAME))}")
    if schema is None:
        schema = pa.schema(
            [(column.name, arrow_type(column, columns[column.name])) for column in COLUMNS if column.name in columns]
        )
    elif set(columns) != set(schema.names):
        changed = sorted(set(columns) ^ set(schema.names))
        raise SchemaError(f"{where}: every write needs the same columns; these differ: {', '.join(changed)}")
    kinds = dict(zip(schema.names, schema.types, strict=True))
    for name, kind in kinds.items():
        if pa.types.is_struct(kind):
            if not kind.num_fields:
                raise DataError(f"{where}: {name} names nothing; leave the column out")
            _check_names(name, kind, columns[name], where)
    try:
        arrays = {name: to_arrow(BY_NAME[name], columns[name], kind) for name, kind in kinds.items()}
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    counts = {name: len(array) for name, array in arrays.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"{where}: the columns differ in length: {counts}")
    _check_lengths({name: array for name, array in arrays.items() if BY_NAME[name].per_token}, where, first_row)
    return pa.Table.from_arrays(list(arrays.values()), schema=schema)


def _check_names(name: str, kind: pa.StructType, cells: Sequence[object], where: str) -> None:
    if isinstance(cells, (pa.Array, pa.ChunkedArray)):
        return  # the cast to the field's type says it
    names = {kind.field(i).name for i in range(kind.num_fields)}
    for cell in cells:
        if isinstance(cell, Mapping) and not names.issuperset(cell):
            extra = ", ".join(sorted(str(each) for each in set(cell) - names))
            raise SchemaError(
                f"{where}: {name} gained {extra} after the first rows were written; "
                "give every name, null where it does not apply, from the first row on"
            )


def _check_lengths(lists: Mapping[str, pa.Array], where: str, first_row: int) -> None:
    expected: np.ndarray | None = None
    offsets: pa.Array | None = None
    first = ""
    for name, cells in lists.items():
        # Columns of one step are usually cut at the same places, which is seen at once.
        if offsets is not None and not cells.null_count and offsets.equals(cells.offsets):
            continue
        lengths = _lengths(cells)
        if expected is None:
            expected, first = lengths, name
            offsets = None if cells.null_count else cells.offsets
            continue
        if np.array_equal(lengths, expected):
            continue
        differs = (lengths != expected) & (lengths >= 0) & (expected >= 0)
        if differs.any():
            row = int(differs.argmax())
            raise DataError(
                f"{where}: row {first_row + row}: {name} has {lengths[row]} tokens where {first} has "
                f"{expected[row]}; token columns of one row are equally long and never padded"
            )
        expected = np.where(expected >= 0, expected, lengths)


def _lengths(cells: pa.Array) -> np.ndarray:
    """Values of each list, -1 for a null."""
    if not cells.null_count:
        # Without `to_numpy`, which imports pandas where it is installed.
        return np.diff(np.from_dlpack(cells.offsets))
    import pyarrow.compute as pc

    return np.asarray(pc.fill_null(pc.list_value_length(cells), -1).to_numpy())

"""Arrow and Parquet types of each kind of column, and the conversion of its cells to an array."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from rolloutdoctor.data.schema import Column, Kind
from rolloutdoctor.results.errors import DataError

_FIXED: dict[Kind, pa.DataType] = {
    Kind.INTEGER: pa.int64(),
    Kind.NUMBER: pa.float64(),
    Kind.IDENTIFIER: pa.string(),
    Kind.TEXT: pa.string(),
    Kind.FLOATS: pa.list_(pa.float32()),
    Kind.TOKENS: pa.list_(pa.int32()),
    Kind.MASK: pa.list_(pa.uint8()),
    Kind.TURNS: pa.list_(
        pa.struct(
            [
                ("author", pa.string()),
                *((name, pa.int64()) for name in ("start", "stop", "turn", "version")),
                *((name, pa.string()) for name in ("status", "error")),
            ]
        )
    ),
}

# The contract stores these as int32: they count a handful of things.
_SMALL_INTEGERS = frozenset({"micro_batch_id", "optim_step_id", "rank"})

CONVERSATION = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def arrow_type(column: Column, values: Iterable[object] = ()) -> pa.DataType:
    """Return the Arrow type that `column` is written with.

    Args:
        column: the column of the contract.
        values: its cells; looked at only where the contract leaves a choice (texts or messages, names of rewards).

    >>> from rolloutdoctor.data.schema import BY_NAME
    >>> str(arrow_type(BY_NAME["policy_log_probs"]))
    'list<item: float>'
    >>> str(arrow_type(BY_NAME["rewards"], [{"accuracy": 1.0}, {"length": 0.5}]))
    'struct<accuracy: double, length: double>'
    """
    if column.name in _SMALL_INTEGERS:
        return pa.int32()
    if isinstance(values, (pa.Array, pa.ChunkedArray)) and column.kind in (Kind.NAMED_NUMBERS, Kind.MESSAGES):
        return values.type
    if column.kind is Kind.NAMED_NUMBERS:
        names = {name: None for cell in values if isinstance(cell, Mapping) for name in cell}
        return pa.struct([(str(name), pa.float64()) for name in names])
    if column.kind is Kind.MESSAGES:
        first = next((cell for cell in values if cell is not None), None)
        return pa.string() if first is None or isinstance(first, str) else CONVERSATION
    return _FIXED[column.kind]


def to_arrow(column: Column, values: Sequence[object], data_type: pa.DataType) -> pa.Array:
    """Turn the cells of a column into an array of `data_type`.

    List cells may be Python lists or one-dimensional NumPy arrays; the latter are joined without a Python loop
    over tokens.

    Raises:
        DataError: if a cell does not fit; the message names the column and what was expected.
    """
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            array = values if values.type == data_type else values.cast(data_type)
            return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if column.kind is Kind.IDENTIFIER:
            values = [None if cell is None else str(cell) for cell in values]
        if column.kind.per_token:
            return _list_array(values, data_type)
        return pa.array(values, type=data_type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        words = " ".join(str(error).split())
        raise DataError(f"column {column.name!r} must hold {column.kind.value}: {words}") from error


def _list_array(values: Sequence[object], data_type: pa.DataType) -> pa.Array:
    element = data_type.value_type
    dtype = element.to_pandas_dtype()
    cells = [None if cell is None else np.asarray(cell) for cell in values]
    # What a float32 cannot hold is infinite here, and found as such.
    with np.errstate(over="ignore"):
        present = [_checked(cell, dtype) for cell in cells if cell is not None]
    lengths = np.array([0 if cell is None else len(cell) for cell in cells], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise ValueError("more than 2**31 tokens in one call; write fewer rows at a time")
    flat = np.concatenate(present) if present else np.zeros(0, dtype)
    is_null = np.array([cell is None for cell in cells], dtype=bool)
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(flat, type=element, from_pandas=False), mask=pa.array(is_null)
    )


def _checked(cell: np.ndarray, dtype: type) -> np.ndarray:
    if cell.ndim != 1:
        raise ValueError(f"a cell has {cell.ndim} dimensions where one was expected")
    if len(cell) and np.issubdtype(dtype, np.integer):
        if not (np.issubdtype(cell.dtype, np.integer) or cell.dtype == bool):
            raise ValueError(f"a cell holds {cell.dtype} where integers were expected")
        limits = np.iinfo(dtype)
        if cell.dtype != bool and (cell.min() < limits.min or cell.max() > limits.max):
            raise ValueError(f"a cell holds values outside {limits.min} to {limits.max}")
    elif len(cell) and cell.dtype.kind not in "fiu":
        # Missing numbers inside a list come as None, that is, as an object array: unknown is NaN here.
        if cell.dtype != object:
            raise ValueError(f"a cell holds {cell.dtype} where numbers were expected")
        cell = np.array([np.nan if number is None else number for number in cell], dtype)
    return cell.astype(dtype, copy=False)

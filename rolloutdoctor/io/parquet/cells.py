"""From arrow columns of one value a row to numpy, checked."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.results.errors import DataError

_INT64_MAX = 2**63 - 1


class Place(NamedTuple):
    """Place of a column's cells, for messages.

    Attributes:
        file: its name.
        label: the column as the file calls it.
        rows: ``[N]`` number in the file of every cell.
    """

    file: str
    label: str
    rows: range | np.ndarray

    def error(self, row: int, message: str) -> DataError:
        """Return the error for the cell at index `row`."""
        return DataError(f"{self.file}: column {self.label}, row {int(self.rows[row])}: {message}")


def step_numbers(column: pa.ChunkedArray, place: Place) -> np.ndarray:
    """Return ``[N]`` int64 steps.

    Raises:
        DataError: on null, negative, or beyond int64.
    """
    if column.null_count:
        row = first(column.is_null())
        raise place.error(row, "null where an optimizer step was expected; log a step for every row")
    steps_N = int64(column, place)
    if (steps_N < 0).any():
        row = int(np.argmax(steps_N < 0))
        raise place.error(row, f"step {steps_N[row]} where 0 or more was expected; number steps from 0")
    return steps_N


def evals(column: pa.ChunkedArray, place: Place) -> np.ndarray:
    """Return ``[N]`` bool, True where the split is eval.

    Raises:
        DataError: on anything but train and eval.
    """
    encoded = _text(column, place).dictionary_encode("encode")
    names, name_N = encoded.dictionary.to_pylist(), as_numpy(encoded.indices)
    for code, name in enumerate(names):
        # Codes are given in the order of first appearance.
        if name not in (TRAIN, EVAL):
            row = int(np.argmax(name_N == code))
            written = "null" if name is None else repr(name)
            raise place.error(
                row, f"split {written} where 'train' or 'eval' was expected; rename it, or drop those rows"
            )
    is_eval_K = np.array([name == EVAL for name in names], bool)
    return is_eval_K.take(name_N)


def identifiers(column: pa.ChunkedArray, place: Place) -> pa.Array:
    """Return the identifiers as ``[N]`` text.

    Raises:
        DataError: on null.
    """
    if column.null_count:
        raise place.error(first(column.is_null()), "null where an identifier was expected; give every row one")
    return _text(column, place)


def texts(column: pa.ChunkedArray, place: Place) -> pa.Array:
    """Return ``[N]`` text, null where the cell is.

    Raises:
        DataError: on bytes that are no text.
    """
    return _text(column, place)


def float64(column: "pa.ChunkedArray | pa.Array") -> np.ndarray:
    """Return ``[N]`` float64, NaN where null."""
    if types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if column.type != pa.float64():
        # Logged integers beyond 2**53 round: they are numbers, not keys.
        column = column.cast(pa.float64(), safe=False)
    return as_numpy(column)


def int64(column: pa.ChunkedArray, place: Place) -> np.ndarray:
    """Return ``[N]`` int64 of integers without nulls.

    Raises:
        DataError: on a value beyond int64.
    """
    if types.is_uint64(column.type):
        import pyarrow.compute as pc

        too_large = pc.greater(column, scalar(_INT64_MAX, pa.uint64()))
        if pc.any(too_large).as_py():
            row = first(too_large)
            raise place.error(row, f"{column[row].as_py()} is beyond int64; log the number itself, not a hash or bits")
    # Arrow hands a cast of chunks to its threads, which takes longer than the numbers of a small step do.
    return as_numpy(column if types.is_int64(column.type) else column.cast(pa.int64()))


def _text(column: pa.ChunkedArray, place: Place) -> pa.Array:
    array = joined(column)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    text = array.cast(pa.large_string())
    refuse_bytes(text, place)
    return text


def refuse_bytes(text: pa.Array, place: Place) -> None:
    """Refuse what the file calls text but is not: arrow does not look, Python would raise."""
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        raise DataError(
            f"{place.file}: column {place.label} holds bytes that are not UTF-8 text; write the file again"
        ) from None


def joined(column: pa.ChunkedArray) -> pa.Array:
    """Return the chunks as one array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def first(is_it: "pa.ChunkedArray | pa.Array") -> int:
    """Return the place of the first True."""
    return int(is_it.index(True).as_py())


def scalar(value: float, kind: pa.DataType) -> pa.Scalar:
    """Return a number as arrow's own: `pa.scalar`, and kernels that are given Python's, import pandas where it is."""
    return pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(np.array([value], kind.to_pandas_dtype()))])[0]


def as_numpy(values: "pa.ChunkedArray | pa.Array") -> np.ndarray:
    """Copy numbers or booleans to numpy, so that they can be written; a null float is NaN.

    By DLPack: arrow's own conversion imports pandas wherever that is installed.
    """
    chunks = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    return np.concatenate([_viewed(chunk) for chunk in chunks or [pa.nulls(0, values.type)]])


def _viewed(array: pa.Array) -> np.ndarray:
    if types.is_boolean(array.type):
        return _viewed(array.cast(pa.uint8())).view(np.bool_)
    if array.null_count:
        array = array.fill_null(scalar(float("nan"), array.type))
    return np.from_dlpack(array)

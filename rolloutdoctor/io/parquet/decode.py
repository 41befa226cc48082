"""From arrow columns to tensors, checked: list columns without a copy wherever arrow's memory already fits."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch import Tensor

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.io.parquet.cells import Place, as_numpy, first, float64, int64, joined, refuse_bytes, scalar

_INT64_MAX = 2**63 - 1


class Lists(NamedTuple):
    """A list column, packed.

    Attributes:
        values: ``[T]`` the cells one after another; a null cell has no values.
        lengths: ``[N]`` int64.
        is_null: ``[N]`` bool, or None if no cell is null.
    """

    values: Tensor
    lengths: np.ndarray
    is_null: np.ndarray | None


def integers(column: pa.ChunkedArray, place: Place) -> Tensor:
    """Return ``[N]`` int64, -1 where null.

    Raises:
        DataError: on a value beyond int64.
    """
    if not column.null_count:
        return torch.from_numpy(int64(column, place))
    # -1 is no value of an unsigned type.
    found_N = int64(pc.fill_null(column, scalar(0, column.type)), place)
    found_N[as_numpy(pc.is_null(column))] = -1
    return torch.from_numpy(found_N)


def numbers(column: "pa.ChunkedArray | pa.Array") -> Tensor:
    """Return ``[N]`` float64, NaN where null."""
    return torch.from_numpy(float64(column))


def named_numbers(column: pa.ChunkedArray, place: Place) -> dict[str, Tensor]:
    """Return ``[N]`` float64 by name, NaN where a row does not have it; a struct's order, a map's first appearance.

    Raises:
        DataError: on a name that is not text.
    """
    array = joined(column)
    if types.is_struct(array.type):
        # flatten() is null where the whole struct is; null-typed fields cast to NaN.
        names = [array.type.field(index).name for index in range(array.type.num_fields)]
        return dict(zip(names, map(numbers, array.flatten()), strict=True))
    # A map's keys and items ignore the slice, its offsets know it.
    offsets = as_numpy(array.offsets)
    row_K = np.repeat(np.arange(len(array)), np.diff(offsets))
    keys = array.keys.slice(offsets[0], len(row_K)).dictionary_encode()
    value_K = numbers(array.items.slice(offsets[0], len(row_K)))
    refuse_bytes(keys.dictionary, place)
    columns = {}
    code_K = as_numpy(keys.indices)
    for code, name in enumerate(keys.dictionary.to_pylist()):
        is_it_K = code_K == code
        columns[name] = torch.full((len(array),), torch.nan, dtype=torch.float64)
        columns[name][torch.from_numpy(row_K[is_it_K])] = value_K[torch.from_numpy(is_it_K)]
    return columns


def lists(column: pa.ChunkedArray, kind: Kind, dtype: torch.dtype, place: Place) -> Lists:
    """Pack a list column, of the types that its `kind` may have.

    Floats come out as `dtype`, with NaN for null elements; masks as bool; token ids as int32 or int64. Values that
    have their type already are the file buffer's own memory: treat them as read-only.

    Raises:
        DataError: on a null in a mask or in token ids, or a mask value other than 0 and 1.
    """
    chunks = column.chunks or [pa.array([], column.type)]
    is_null_N = as_numpy(pc.is_null(column)) if column.null_count else None
    cells = [_cells(chunk) for chunk in chunks]
    flat = [values for values, _ in cells]
    lengths_N = np.concatenate([lengths for _, lengths in cells])
    if kind is Kind.FLOATS:
        parts = [_floats(values, dtype) for values in flat]
    else:
        parts, ends = [], np.cumsum(lengths_N)
        start = 0
        for values in flat:
            pack = _tokens if kind is Kind.TOKENS else _mask
            parts.append(pack(values, start, ends, place))
            start += len(values)
    return Lists(concatenated(parts), lengths_N, is_null_N)


def split_lists(cells: Lists, starts: np.ndarray) -> list[Lists]:
    """Cut a packed column into the rows from each of `starts` to the next; the values stay where they are."""
    if not len(starts):
        return []
    sizes = np.add.reduceat(cells.lengths, starts).tolist()
    lengths = np.split(cells.lengths, starts[1:])
    is_null = [None] * len(starts) if cells.is_null is None else np.split(cells.is_null, starts[1:])
    values = torch.split(cells.values, sizes)
    return [
        Lists(x_T, n_N, None if null_N is None or not null_N.any() else null_N)
        for x_T, n_N, null_N in zip(values, lengths, is_null, strict=True)
    ]


def _cells(chunk: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The values of all cells, and ``[N]`` int64 how many each has; a null cell has none."""
    if not chunk.null_count and (types.is_list(chunk.type) or types.is_large_list(chunk.type)):
        # The same as below with fewer calls: `.values` ignores the slice of a sliced array, its offsets know it.
        offsets = np.from_dlpack(chunk.offsets).astype(np.int64, copy=False)
        return chunk.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets[1:] - offsets[:-1]
    lengths = pc.list_value_length(chunk)
    return chunk.flatten(), as_numpy(pc.fill_null(lengths, scalar(0, lengths.type))).astype(np.int64, copy=False)


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Join one or more tensors on the CPU; a single one is not copied.

    Numpy copies on the calling thread. torch.cat and clone would wake torch's threads for every piece, and on cores
    that are busy evaluating each such meeting of threads costs a time slice.
    """
    if len(parts) == 1:
        return parts[0]
    arrays = [part.numpy() for part in parts]
    out = empty(sum(map(len, arrays)), np.result_type(*arrays))
    return torch.from_numpy(np.concatenate(arrays, out=out))


def empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Space for `count` values in arrow's memory.

    Columns of a step come and go with those that arrow decodes. From one allocator, each takes the place of another;
    from two, the holes that either leaves are lost to the other, and memory grows with the number of steps.
    """
    return np.frombuffer(pa.allocate_buffer(count * dtype.itemsize), dtype)


def copied(values: Tensor) -> Tensor:
    """Return a copy in memory of its own, made on the calling thread."""
    return torch.from_numpy(values.numpy().copy())


def _floats(values: pa.Array, dtype: torch.dtype) -> Tensor:
    # Arrow converts on the thread that asks; torch would start its own threads for it, beside those that evaluate.
    wanted = pa.float64() if dtype is torch.float64 else pa.float32()
    if values.type != wanted:
        values = values.cast(wanted, safe=False)
    if values.null_count:
        values = pc.fill_null(values, scalar(float("nan"), wanted))
    return _tensor(values)


def _tokens(values: pa.Array, start: int, ends_N: np.ndarray, place: Place) -> Tensor:
    _refuse_nulls(values, start, ends_N, place, "a token id")
    if types.is_int32(values.type):
        return _tensor(values)
    if types.is_uint64(values.type):
        too_large = pc.greater(values, scalar(_INT64_MAX, pa.uint64()))
        if pc.any(too_large).as_py():
            raise place.error(_row_of(start + first(too_large), ends_N), "a token id beyond int64; log the real ids")
    return _tensor(values.cast(pa.int64()))


def _mask(values: pa.Array, start: int, ends_N: np.ndarray, place: Place) -> Tensor:
    _refuse_nulls(values, start, ends_N, place, "0 or 1")
    if not len(values):
        return torch.zeros(0, dtype=torch.bool)
    if types.is_boolean(values.type):
        # Arrow packs booleans into bits.
        return _tensor(values.cast(pa.uint8())).view(torch.bool)
    ends = pc.min_max(values)
    if ends["min"].as_py() < 0 or ends["max"].as_py() > 1:
        token = first(pc.invert(pc.is_in(values, pa.array([0, 1], values.type))))
        message = f"{values[token].as_py()} where 0 or 1 was expected; log a mask, not a weight or a count"
        raise place.error(_row_of(start + token, ends_N), message)
    # A byte that is 0 or 1 is what torch keeps for a bool: no copy.
    return _tensor(values.cast(pa.uint8())).view(torch.bool)


def _refuse_nulls(values: pa.Array, start: int, ends_N: np.ndarray, place: Place, expected: str) -> None:
    if values.null_count:
        row = _row_of(start + first(pc.is_null(values)), ends_N)
        raise place.error(row, f"a null inside the list where {expected} was expected; log a value for every token")


def _row_of(token: int, ends_N: np.ndarray) -> int:
    return int(np.searchsorted(ends_N, token, side="right"))


def _tensor(values: pa.Array) -> Tensor:
    """View an array without nulls; DLPack neither copies nor warns that arrow's memory is read-only."""
    if types.is_null(values.type):
        return torch.zeros(0, dtype=torch.int64)
    return torch.utils.dlpack.from_dlpack(values)

"""Padded arrays of a batch as the ragged cells of a run file, without a loop over rows or tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from torch import Tensor


def copied(tensor: "Tensor") -> "Tensor":
    """Copy a tensor to the CPU as it is; the trainer goes on using the original."""
    return tensor.detach().to("cpu", copy=True)


def floats(tensor: "Tensor") -> np.ndarray:
    """View a CPU tensor as float32; other precisions are converted."""
    return tensor.float().numpy()


def present(lengths: np.ndarray) -> np.ndarray:
    """Mark the slots of a padded array that rows of these lengths have, ``[N, T]`` bool."""
    return np.arange(int(lengths.max(initial=0)))[None, :] < lengths[:, None]


def ragged(padded: np.ndarray, slots: np.ndarray, kind: pa.DataType) -> pa.Array:
    """Cut a padded array into lists.

    Args:
        padded: ``[N, T']``, of which the marked slots count; ``[N, 1]`` holds one value for all tokens of a row.
        slots: ``[N, T]`` bool, T' >= T.
        kind: of the values.

    Raises:
        ValueError: if `padded` is narrower than its longest row.
    """
    if padded.shape[1] == 1:
        padded = np.broadcast_to(padded, (len(padded), slots.shape[1]))
    if padded.shape[1] < slots.shape[1]:
        raise ValueError(f"an array is padded to {padded.shape[1]} tokens where a row has {slots.shape[1]}")
    values = padded[:, : slots.shape[1]][slots].astype(kind.to_pandas_dtype(), copy=False)
    offsets = np.concatenate([[0], np.cumsum(slots.sum(1))]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def at_rows(parts: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    """Put the rows of micro-batches back to their places in the batch, ``[N, T]``; padding of a part may be narrower.

    Args:
        parts: of each micro-batch, the places of its rows and their values ``[n, t]``.
        shape: of the batch.
    """
    whole = np.zeros(shape, parts[0][1].dtype)
    for rows, values in parts:
        width = min(values.shape[1], shape[1])
        whole[rows, :width] = values[:, :width]
    return whole

"""Padded arrays of a batch as the ragged cells of a run file, without a loop over rows or tokens."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from rolloutdoctor.io.write.recorded_rows import Lists

if TYPE_CHECKING:
    from torch import Tensor


def copied(tensor: "Tensor") -> "Tensor":
    """Copy a tensor to the CPU as it is; the trainer goes on using the original."""
    return tensor.detach().to("cpu", copy=True)


def floats(tensor: "Tensor") -> np.ndarray:
    """View a CPU tensor as float32; other precisions are converted."""
    return tensor.float().numpy()


class Cut:
    """Conversion of padded rows to lists: made once, used by every column of the same rows.

    Args:
        slots: ``[N, T]`` bool, the slots that hold tokens.
        lengths: ``[N]``, how many each row has.

    Attributes:
        slots: the same.
        offsets: ``[N + 1]`` int32, where the list of each row begins.
    """

    def __init__(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.slots = slots
        offsets = np.zeros(len(lengths) + 1, np.int32)
        lengths.cumsum(out=offsets[1:])
        self.offsets = offsets

    @classmethod
    def after(cls, lengths: np.ndarray) -> "Self":
        """Rows of these lengths, padded on the right."""
        return cls(np.arange(lengths.max(initial=0)) < lengths[:, None], lengths)

    @classmethod
    def of(cls, slots: np.ndarray) -> "Self":
        """Rows with tokens in these slots, ``[N, T]`` bool."""
        return cls(slots, slots.sum(1))

    def lists(self, padded: np.ndarray, dtype: type[np.generic]) -> Lists:
        """Cut a padded array into lists.

        Args:
            padded: ``[N, T']`` with T' >= T; ``[N, 1]`` holds one value for all tokens of a row.
            dtype: of the values.

        Raises:
            ValueError: if `padded` is narrower than its longest row.
        """
        width = self.slots.shape[1]
        if padded.shape[1] == 1:
            padded = np.broadcast_to(padded, (len(padded), width))
        if padded.shape[1] < width:
            raise ValueError(f"an array is padded to {padded.shape[1]} tokens where a row has {width}")
        # What a float32 cannot hold is infinite here.
        with np.errstate(over="ignore"):
            return Lists(padded[:, :width][self.slots].astype(dtype, copy=False), self.offsets)


def at_rows(parts: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> np.ndarray:
    """Put the rows of micro-batches back to their places in the batch, ``[N, T]``; padding of a part may be narrower.

    Args:
        parts: of each micro-batch, the places of its rows and their values ``[n, t]``.
        shape: of the batch.
    """
    padded = np.zeros(shape, parts[0][1].dtype)
    for rows, values in parts:
        width = min(values.shape[1], shape[1])
        padded[rows, :width] = values[:, :width]
    return padded

"""Packed batches as the padded matrices that the trainers work on, and back."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch


def pad(batch: RolloutBatch, column_T: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``[T]`` to ``[N, width]``, zeros to the right; at least one column wide."""
    lengths = batch.rows.diff()
    width = max(1, int(lengths.max()))
    dtype = dtype or column_T.dtype
    padded = torch.zeros(len(batch), width, dtype=dtype)
    for row, (start, stop) in enumerate(zip(batch.rows[:-1].tolist(), batch.rows[1:].tolist(), strict=True)):
        padded[row, : stop - start] = column_T[start:stop].to(dtype)
    return padded


def pack(batch: RolloutBatch, padded: Tensor) -> Tensor:
    """``[N, width]`` to ``[T]``."""
    return torch.cat([padded[row, :length] for row, length in enumerate(batch.rows.diff().tolist())])


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Call upstream in a precision.

    It makes tensors without a dtype inside, which follow the default, and some that it wants in float32: in float64
    those names mean float64 too, so that nothing but the precision changes.
    """
    before = torch.get_default_dtype(), torch.float32, np.float32, torch.Tensor.float
    torch.set_default_dtype(dtype)
    if dtype == torch.float64:
        torch.float32, np.float32, torch.Tensor.float = torch.float64, np.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, np.float32, torch.Tensor.float = before[1:]
        torch.set_default_dtype(before[0])


def rounding(single: Tensor | float, double: Tensor | float, dtype: torch.dtype) -> Tensor:
    """What upstream rounds off: its distance in float32 from itself in float64; nothing in float64."""
    lost = (torch.as_tensor(single, dtype=torch.float64) - torch.as_tensor(double, dtype=torch.float64)).abs()
    return lost if dtype == torch.float32 else torch.zeros_like(lost)

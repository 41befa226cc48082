"""Packed batches as the padded matrices that the trainers work on, and back."""

import torch
from torch import Tensor

from rolloutdoctor.batch import RolloutBatch


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


def error(own_T: Tensor, wanted_T: Tensor) -> float:
    """Largest difference as a share of the largest magnitude; 0 for nothing."""
    if not wanted_T.numel():
        return 0.0
    largest = float(wanted_T.abs().max())
    worst = float((own_T.double() - wanted_T.double()).abs().max())
    return worst / largest if largest else worst

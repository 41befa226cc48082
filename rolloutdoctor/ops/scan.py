"""Reverse linear recurrences over packed rows."""

import torch
from torch import Tensor


def reverse_scan(x_T: Tensor, decay: float, offsets: Tensor) -> Tensor:
    """``y_t = x_t + decay * y_{t+1}`` inside each run, float64 ``[T]``; y is 0 beyond the end of a run.

    Runs in ``log2(longest run)`` passes over all tokens: after pass k every value holds ``2^k`` terms of its sum.

    >>> import torch
    >>> reverse_scan(torch.tensor([1.0, 1.0, 1.0]), 0.5, torch.tensor([0, 2, 3])).tolist()
    [1.5, 1.0, 1.0]
    """
    y_T = x_T.double().clone()
    lengths = offsets.diff()
    position_T = torch.arange(len(y_T), device=y_T.device)
    end_T = torch.repeat_interleave(offsets[1:], lengths, output_size=len(y_T))
    step, longest = 1, int(lengths.max()) if len(lengths) else 0
    while step < longest:
        reaches_T = position_T[:-step] + step < end_T[:-step]
        y_T[:-step] += torch.where(reaches_T, decay**step * y_T[step:], 0.0)
        step *= 2
    return y_T

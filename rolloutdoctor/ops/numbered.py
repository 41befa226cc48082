"""`numbered`: rows that are equal in some keys have one number."""

import numpy as np
import torch
from torch import Tensor


def numbered(*keys: Tensor) -> Tensor:
    """Number the different rows, ``[n]`` int64, from 0 on in the order of their keys; equal rows have one number.

    Args:
        keys: ``[n]`` integers each, on the CPU.

    >>> numbered(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 5, 5, 5])).tolist()
    [1, 0, 2, 2]
    """
    columns = [key_n.numpy() for key_n in keys]
    order = np.lexsort(columns[::-1])
    is_new = np.zeros(len(order), bool)
    for column in columns:
        is_new[1:] |= np.diff(column[order]) != 0
    number_n = np.empty_like(order)
    number_n[order] = is_new.cumsum()
    return torch.from_numpy(number_n)

"""Rows that are equal in some keys: which of them are new, and a number for each kind."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def is_new(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which rows differ from the one before in one of some keys, ``[n]``; the first one does.

    >>> is_new(np.array([0, 0, 0, 1]), np.array([5, 5, 7, 7])).tolist()
    [True, False, True, True]
    """
    found = np.ones(len(keys[0]), bool)
    found[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return found


def numbered(*keys: Tensor) -> Tensor:
    """Number the different rows, ``[n]`` int64, from 0 on in the order of their keys; equal rows have one number.

    Args:
        keys: ``[n]`` integers each, on the CPU.

    >>> numbered(torch.tensor([0, 0, 1, 1]), torch.tensor([7, 5, 5, 5])).tolist()
    [1, 0, 2, 2]
    """
    columns = [key_n.numpy() for key_n in keys]
    order = np.lexsort(columns[::-1])
    number_n = np.empty_like(order)
    number_n[order] = is_new(*(column[order] for column in columns)).cumsum() - 1
    return torch.from_numpy(number_n)

"""Rows that differ from the one before in some keys."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_new(*keys: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which rows differ from the one before in one of some keys, ``[n]``; the first one does.

    >>> is_new(np.array([0, 0, 0, 1]), np.array([5, 5, 7, 7])).tolist()
    [True, False, True, True]
    """
    found = np.ones(len(keys[0]), bool)
    found[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return found

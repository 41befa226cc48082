"""The smallest keys of each step: a random choice, of hashes, that is the same in whatever order steps come."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.numbered import is_new


def kept_keys(
    key_n: Tensor, value_n: Tensor, by_step: ByStep, numbers: Sequence[int], keep: int, *, largest: bool
) -> list[dict[str, float]]:
    """Return the records of `bottom_k` of each step: ``KEY:STEP`` to a value, in the order of the keys.

    Args:
        key_n: hash of each row, int64.
        value_n: its value, float64.
        by_step: the rows by step.
        numbers: of the steps.
        keep: how many keys of a step are kept, at most.
        largest: of several values of a key the largest stays; else the smallest.

    >>> import torch
    >>> rows = ByStep.of_sizes([3, 1])
    >>> keys, values = torch.tensor([5, -5, 5, 5]), torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
    >>> kept_keys(keys, values, rows, [7, 8], 1, largest=True)
    [{'7ffffffffffffffb:7': 1.0}, {'8000000000000005:8': 3.0}]
    """
    key, value, step = key_n.cpu().numpy(), value_n.cpu().numpy(), by_step.step_N.cpu().numpy()
    order = np.lexsort((key, step))
    key, value, step = key[order], value[order], step[order]
    is_first = is_new(key, step)
    value = (np.maximum if largest else np.minimum).reduceat(value, np.flatnonzero(is_first))
    key, step = key[is_first], step[is_first]
    is_kept = np.arange(len(key)) - np.searchsorted(step, step) < keep
    found: list[dict[str, float]] = [{} for _ in numbers]
    for place, hashed, one in zip(*(x[is_kept].tolist() for x in (step, key, value)), strict=True):
        found[place][f"{hashed + 2**63:016x}:{numbers[place]}"] = one
    return found

"""Version stamps of rows."""

import torch
from torch import Tensor

from rolloutdoctor.ops.by_step import ByStep


def lags_of(oldest_N: Tensor | None, newest_N: Tensor | None, most: int, by_step: ByStep) -> Tensor | None:
    """Return the lag of each row's oldest part behind the newest version of its step; None without stamps.

    Args:
        oldest_N: oldest version that sampled each row, ``[N]`` int64, below 0 where it is unknown.
        newest_N: the newest, likewise.
        most: so many lags are counted separately; the last holds all beyond it.
        by_step: the rows by step.

    >>> lags_of(torch.tensor([3, 5, -1]), torch.tensor([4, 5, -1]), 8, ByStep.of_sizes([3])).tolist()
    [2, 0, 0]
    """
    if oldest_N is None or newest_N is None or not len(oldest_N):
        return None
    last_N = by_step.expand(by_step.high(newest_N)).long()
    lag_N = torch.where(oldest_N >= 0, last_N - oldest_N, 0)
    return lag_N.clamp_(0, most - 1)

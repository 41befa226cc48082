"""Log-probs that are as many places late or early as their row has padding: left-padded ones read as right-padded."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.rules.measures.neighbour_fit import COLUMNS, Limits
from rolloutdoctor.rules.measures.sampled_rows import Sample

LEAST_PADDING = 2
"""Places from which on a shift by the padding is none by one token."""


def errors_by_padding(sample: Sample, limits: Limits, batch: RolloutBatch) -> list[Tensor]:
    """Compare sampled rows in place, and moved by as many places as they are shorter than the longest of their step.

    Steps whose rows all agree in place are not looked at, nor rows of which neither side has a partner: NaN. A side
    without a partner does not fit: infinity.

    Returns:
        `COLUMNS`, ``[N]`` each, as `errors_of`; the last, of whole steps, is NaN.
    """
    columns = torch.full((len(COLUMNS), len(batch)), torch.nan, dtype=torch.float64)
    if not len(sample.place):
        return list(columns)
    length_N, by_step = batch.rows.diff().cpu(), batch.by_step.cpu
    padding_N = by_step.expand(by_step.high(length_N)).long() - length_N
    apart = sample.by_row(np.square(sample.apart)) / np.maximum(sample.length, 1)
    differs = (padding_N.numpy()[sample.row] >= LEAST_PADDING) & (apart > limits.spread**2)
    differs_N = torch.zeros(len(length_N), dtype=torch.bool)
    differs_N[sample.row] = torch.from_numpy(differs)
    padding_N *= by_step.expand(by_step.any(differs_N))
    errors = padding_errors(sample, padding_N.numpy(), limits)
    errors[1:] = np.where(np.isnan(errors[0]), np.nan, np.nan_to_num(errors[1:], nan=np.inf))
    columns[:3, sample.row] = torch.from_numpy(errors)
    return list(columns)


def padding_errors(sample: Sample, padding_N: NDArray[np.int64], limits: Limits) -> NDArray[np.float64]:
    """Squared differences of sampled rows in place, and where one of the two is moved by the padding of the row.

    Args:
        sample: of the rows.
        padding_N: places that each row of the block is shorter than the longest of its step, ``[N]``.
        limits: fewest tokens that have a partner as many places away, and how much the log-probs of these vary.

    Returns:
        ``[3, r]``: sums of squared differences of the sampled rows in place, with their own log-probs late, and early;
        NaN where a row has less padding than `LEAST_PADDING`, or its log-probs do not vary.
    """
    stacked = np.full((3, len(sample.row)), np.nan)
    padding_r = padding_N[sample.row]
    has = padding_r >= LEAST_PADDING
    if not has.any():
        return stacked
    sampler, trainer, place = sample.sampler, sample.trainer, sample.place
    row, by = (sample.runs.spread(x) for x in (np.arange(len(sample.row)), np.where(has, padding_r, 0)))
    key = row * int(place.max() + by.max() + 1) + place
    errors = []
    for side in (1, -1):
        # Late: the own log-prob of a token is the other's of as many places before.
        wanted = key - side * by
        at = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
        fits = (key[at] == wanted) & (row[at] == row) & (by > 0)
        count = np.maximum(sample.by_row(fits), 1)
        mean = sample.by_row(np.where(fits, trainer[at], 0.0)) / count
        varies = sample.by_row(np.where(fits, np.square(trainer[at] - sample.runs.spread(mean)), 0.0)) / count
        moved, aligned = (sample.by_row(np.where(fits, np.square(sampler - x), 0.0)) for x in (trainer[at], trainer))
        is_known = has & (count >= limits.pairs) & (varies > limits.spread**2)
        errors.append((np.where(is_known, moved, np.nan), np.where(is_known, aligned, np.nan)))
    (late, late_here), (early, early_here) = errors
    stacked[0] = np.where(np.nan_to_num(late, nan=np.inf) <= np.nan_to_num(early, nan=np.inf), late_here, early_here)
    stacked[1:] = late, early
    return stacked

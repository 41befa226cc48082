"""Normalisation whose mean and deviation are each over a group, over the batch, or left out."""

from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.scores import Advantages, Scores
from rolloutdoctor.objective.objective import AdvantageRule, Levels
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups


class Normalised(NamedTuple):
    """Normalised values and what made them, float64 ``[n]`` each.

    Attributes:
        value: ``(x - mean) / divisor``, 0 where nothing counts.
        mean: what was subtracted.
        divisor: deviation plus epsilon, or 1.
    """

    value: Tensor
    mean: Tensor
    divisor: Tensor


def normalised(x: Tensor, weight: Tensor, group: Tensor, single: Tensor, levels: Levels) -> Normalised:
    """``(x - mean) / (deviation + epsilon)``, the moments of each level over what counts there.

    A mean of the others is taken over what else counts. A deviation is about the mean that is subtracted, whatever its
    level. The only row of a group has itself for the mean of the others, and 1 for an unbiased deviation.

    Source: AReaL ``Normalization`` (areal/utils/data.py).

    Args:
        x: ``[n]`` values of rows or tokens.
        weight: ``[n]`` how often each counts: tokens of a row, or 1.
        group: ``[n]`` int64 group of each.
        single: ``[n]`` bool, the group has one row.
        levels: of mean and deviation.
    """
    value, weight = x.double(), weight.double()
    value = torch.where(weight > 0, value, 0.0)
    over = {"group": group, "batch": torch.zeros_like(group)}
    mean = torch.zeros_like(value)
    if levels.mean is not None:
        mean = _mean(value, weight, over[levels.mean], of_others=levels.of_others)
        if levels.of_others and levels.mean == "group":
            mean = torch.where(single, value, mean)
    centred = torch.where(weight > 0, value - mean, 0.0)
    divisor = torch.ones_like(value)
    if levels.std is not None:
        index = over[levels.std]
        count = seg.total_by(index, weight)[index]
        squares = seg.total_by(index, weight * centred.square())[index]
        free = count - 1 if levels.unbiased else count
        deviation = torch.where(free > 0, (squares / free.clamp(min=1e-300)).sqrt(), 1.0)
        if levels.unbiased and levels.std == "group":
            deviation = torch.where(single, 1.0, deviation)
        divisor = deviation + levels.epsilon
    return Normalised(centred / divisor, mean, divisor)


def _mean(value: Tensor, weight: Tensor, index: Tensor, *, of_others: bool) -> Tensor:
    """Weighted mean of each index, given to its values; equal values have exactly that mean."""
    count, total = (seg.total_by(index, each)[index] for each in (weight, weight * value))
    least, largest = (_extreme(value, weight, index, bound) for bound in (torch.inf, -torch.inf))
    if of_others:
        mean = torch.where(count > 1, (total - value) / (count - 1).clamp(min=1), 0.0)
        return torch.where((least == largest) & (count > 1), value, mean)
    mean = torch.where(count > 0, total / count.clamp(min=1), 0.0)
    return torch.where(least == largest, value, mean)


def _extreme(value: Tensor, weight: Tensor, index: Tensor, bound: float) -> Tensor:
    """Least value that counts of each index, given to its values, or with a bound below the largest one."""
    extreme = torch.full((int(index.max()) + 1 if len(index) else 0,), bound, dtype=value.dtype, device=value.device)
    reduce = "amin" if bound > 0 else "amax"
    return extreme.scatter_reduce(0, index, torch.where(weight > 0, value, bound), reduce)[index]


def level_scores(scores: Scores, rule: AdvantageRule) -> Advantages:
    """Scores normalised over the baseline rows, by `AdvantageRule.row_levels`."""
    assert rule.row_levels is not None  # of the estimator
    levels = normalised(
        scores.score_N, scores.in_baseline_N, scores.groups.index_N, alone(scores.groups), rule.row_levels
    )
    return Advantages(levels.value, levels.mean)


def alone(groups: Groups) -> Tensor:
    """Rows that are the only one of their group, ``[N]`` bool."""
    return (groups.size_G == 1)[groups.index_N]

"""Normalisation over the batch: of advantages, and of rewards that were normalised one by one before."""

from collections.abc import Callable

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.scores import Advantages, Scores
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import TRAINER, CannotComputeError


def over_batch(x_N: Tensor, in_baseline_N: Tensor, epsilon: float, batches: Groups) -> Tensor:
    """``(x - mean) / (std + epsilon)`` over the baseline rows of the row's batch, 0 for the rest, ``[N]`` float64.

    A single baseline row has no standard deviation, so it gets 0, also among several rows.
    """
    stats = GroupStats(batches, in_baseline_N)
    mean_G = stats.mean(x_N)
    mean_N, std_N = stats.per_row(mean_G), stats.per_row(stats.std(x_N, mean_G))
    able_N = in_baseline_N & (stats.count_N > 1)
    return torch.where(able_N, (x_N - mean_N) / (std_N + epsilon), 0.0)


def normalize_then_sum(scores: Scores, rule: AdvantageRule) -> Advantages:
    """GDPO as TRL has it: every reward is normalised in its group, then their weighted sum over the batch.

    A reward that a row does not have (NaN) leaves its own mean and standard deviation, and adds nothing to that row;
    the scale of the rewards that is configured has no say. The baseline is the weighted sum of the group means.

    Source: arXiv 2601.05242; TRL ``GRPOTrainer._generate_and_score_completions``.
    """
    groups = scores.groups
    parts_N = list(scores.named.values()) or [scores.score_N]
    weights = rule.reward_weights or (1.0,) * len(parts_N)
    sum_N, baseline_N = torch.zeros_like(scores.score_N), torch.zeros_like(scores.score_N)
    for weight, part_N in zip(weights, parts_N, strict=True):
        has_N = scores.in_baseline_N & ~part_N.isnan()
        clean_N = torch.where(has_N, part_N, 0.0)
        stats = GroupStats(groups, has_N)
        mean_G = stats.mean(clean_N)
        mean_N, std_N = stats.per_row(mean_G), stats.per_row(stats.std(clean_N, mean_G))
        # The only row of a group that has the reward has no standard deviation, and adds nothing.
        able_N = has_N & ~std_N.isnan()
        sum_N += weight * torch.where(able_N, (clean_N - mean_N) / (std_N + rule.epsilon), 0.0)
        baseline_N += weight * torch.where(has_N, mean_N, 0.0)
    return Advantages(over_batch(sum_N, scores.in_baseline_N, rule.epsilon, scores.whole), baseline_N)


def normalised_sum(
    scores: Scores, rule: AdvantageRule, score: Callable[[Scores, AdvantageRule], Advantages]
) -> Advantages:
    """Weighted sum of the scores of each reward, by name, then ``(x - mean) / std`` over the rows without an epsilon.

    The weights follow the names in alphabetical order; where all sums are equal they are centred alone.

    Source: arXiv 2601.05242; NeMo-RL ``GDPOAdvantageEstimator``.

    Args:
        scores: the rewards.
        rule: their weights, and what `score` takes.
        score: makes the advantages of one reward.

    Raises:
        CannotComputeError: for fewer than two rewards, where NeMo-RL fails.
    """
    if len(scores.named) < 2:
        raise CannotComputeError(f"gdpo needs two rewards or more in column rewards; {TRAINER} fails here")
    weights = rule.reward_weights or (1.0,) * len(scores.named)
    advantages = [score(scores.of(scores.named[name]), rule) for name in sorted(scores.named)]
    value_N, baseline_N = (
        sum(
            (weight * each[place] for weight, each in zip(weights, advantages, strict=True)),
            torch.zeros_like(advantages[0][0]),
        )
        for place in (0, 1)
    )
    return Advantages(normalised_rows(value_N, scores.in_baseline_N), baseline_N)


def normalised_rows(x_N: Tensor, in_baseline_N: Tensor) -> Tensor:
    """``(x - mean) / std`` over the baseline rows, 0 for the rest, ``[N]`` of the dtype of `x_N`; std 0 divides not."""
    baseline_n = x_N[in_baseline_N]
    std = baseline_n.std() if len(baseline_n) > 1 else baseline_n.new_zeros(())
    centred_N = torch.where(in_baseline_N, x_N - baseline_n.mean(), 0.0)
    return centred_N / std if float(std) > 0 else centred_N

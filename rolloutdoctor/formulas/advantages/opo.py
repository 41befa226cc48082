"""OPO: the baseline is the length-weighted mean of the group."""

import torch

from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, singleton_advantage
from rolloutdoctor.objective.objective import AdvantageRule


def opo(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = s_i - sum_g L_j s_j / sum_g L_j`` over the baseline rows, L the number of trained tokens.

    A row with no token left has no weight, so it does not move the baseline; but it still counts as a sibling, and
    a group with no token at all has the baseline 0 / 0, which is NaN upstream too. verl's mask keeps that NaN out of
    the loss but not out of its gradient, and the optimizer step is skipped; rule ``nonfinite-values`` names the rows.

    Source: arXiv 2505.23585; verl ``compute_opo_outcome_advantage``.
    """
    groups = scores.groups
    weight_N = torch.where(scores.in_baseline_N, scores.length_N.double(), 0.0)
    # Measured from the mean, so that equal scores have exactly that baseline; an infinite one has no distances.
    mean_N = scores.mean_N()
    mean_N = torch.where(mean_N.isinf(), 0.0, mean_N)
    excess_G = groups.total(weight_N * scores.of_baseline_rows(scores.score_N - mean_N))
    baseline_N = mean_N + scores.stats.per_row(excess_G / groups.total(weight_N))
    return singleton_advantage(
        scores, Advantages(scores.of_baseline_rows(scores.score_N - baseline_N), baseline_N), rule.singleton
    )

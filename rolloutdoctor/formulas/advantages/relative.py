"""Scores relative to the mean of their group."""

import torch

from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, singleton_advantage
from rolloutdoctor.objective.objective import AdvantageRule


def relative_to_mean(scores: Scores, rule: AdvantageRule) -> Advantages:
    """``A_i = (s_i - mean_g) / mean_g``, 0 where the mean is not positive.

    Source: MaxRL, arXiv 2602.02710; prime-rl ``MaxRLAlgorithm.score_group``.
    """
    mean_N = scores.mean_N()
    raw_N = scores.of_baseline_rows(scores.score_N - mean_N)
    advantages = Advantages(torch.where(mean_N > 0, raw_N / mean_N, 0.0), mean_N)
    return singleton_advantage(scores, advantages, rule.singleton)

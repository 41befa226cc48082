"""RLOO: the baseline of a row is the mean of its siblings."""

import torch

from rolloutdoctor.formulas.advantages.normalised import over_batch
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, singleton_advantage
from rolloutdoctor.objective.objective import AdvantageRule


def rloo(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = s_i - mean of the other baseline rows = n / (n - 1) (s_i - mean_g)``.

    Source: Ahmadian et al. 2024, arXiv 2402.14740; verl ``compute_rloo_outcome_advantage``, where a single row of
    a group keeps its raw score, and ``compute_rloo_vectorized_outcome_advantage``, where it gets 0; TRL
    ``RLOOTrainer``, where it gets 0 and has no part in the normalisation over the batch.
    """
    baseline_rows_N = scores.baseline_rows_N
    factor_N = torch.where(baseline_rows_N > 1, baseline_rows_N / (baseline_rows_N - 1), 0.0)
    value_N = scores.of_baseline_rows(factor_N * (scores.score_N - scores.mean_N()))
    found = singleton_advantage(scores, Advantages(value_N, scores.score_N - value_N), rule.singleton)
    if not rule.normalised:
        return found
    able_N = scores.in_baseline_N & (baseline_rows_N > 1)
    return found._replace(value_N=over_batch(found.value_N, able_N, rule.epsilon, scores.whole))

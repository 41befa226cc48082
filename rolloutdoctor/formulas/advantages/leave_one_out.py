"""RLOO: the baseline of a row is the mean of its siblings."""

import torch

from rolloutdoctor.formulas.advantages.normalised import over_batch
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, lone_voter
from rolloutdoctor.objective.objective import AdvantageRule


def rloo(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = s_i - mean of the other voters = n / (n - 1) (s_i - mean_g)``.

    Source: Ahmadian et al. 2024, arXiv 2402.14740; verl ``compute_rloo_outcome_advantage``, where the only voter of
    a group keeps its raw score, and ``compute_rloo_vectorized_outcome_advantage``, where it gets 0; TRL
    ``RLOOTrainer``, where it gets 0 and has no part in the normalisation over the batch.
    """
    voters_N = scores.voters_N
    factor_N = torch.where(voters_N > 1, voters_N / (voters_N - 1), 0.0)
    value_N = scores.of_voters(factor_N * (scores.score_N - scores.mean_N()))
    found = lone_voter(scores, Advantages(value_N, scores.score_N - value_N), rule.lone)
    if not rule.normalised:
        return found
    able_N = scores.vote_N & (voters_N > 1)
    return found._replace(value_N=over_batch(found.value_N, able_N, rule.epsilon, scores.whole))

"""The formula of every estimator by name, a table for each axis; `rolloutdoctor.objective.estimators` has the rest."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from rolloutdoctor.formulas.advantages.gdpo import gdpo
from rolloutdoctor.formulas.advantages.grpo import gpg, grpo, grpo_passk, raw, reinforce_plus_plus_baseline
from rolloutdoctor.formulas.advantages.leave_one_out import leave_one_out_score, rloo, rloo_scaled
from rolloutdoctor.formulas.advantages.levels import level_scores
from rolloutdoctor.formulas.advantages.normalised import normalised_sum, normalize_then_sum
from rolloutdoctor.formulas.advantages.opo import opo
from rolloutdoctor.formulas.advantages.relative import relative_to_mean
from rolloutdoctor.formulas.advantages.response_tokens import (
    ResponseScores,
    discounted_token_returns,
    gae,
    gae_of_masked,
    gae_of_trained,
    group_scores_of_tokens,
    penalised_group_scores,
    penalised_scores,
    response_returns,
    returns_of_scores,
    scores_of_tokens,
)
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores
from rolloutdoctor.formulas.advantages.token_baselines import optimal_token_baseline, tir_optimal_token_baseline
from rolloutdoctor.formulas.advantages.tokens import (
    TokenScores,
    as_stored,
    discounted_returns,
    gae_returns,
    masked_gae,
    reinforce_plus_plus,
    remax,
    rewards_to_go,
    scores_to_go,
)
from rolloutdoctor.objective.objective import AdvantageRule

TokenFormula = Callable[[TokenScores, AdvantageRule], Tensor]


class TokenEstimator(NamedTuple):
    """The formulas of an estimator over the trained tokens, ``[V]`` each.

    Attributes:
        advantages: what the policy is trained with.
        returns: what a critic would be trained on.
    """

    advantages: TokenFormula
    returns: TokenFormula


ESTIMATORS: dict[str, Callable[[Scores, AdvantageRule], Advantages]] = {
    "gdpo": gdpo,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "leave_one_out_score": leave_one_out_score,
    "level_scores": level_scores,
    "normalised_sum": partial(normalised_sum, score=grpo),
    "normalised_sum_of_others": partial(normalised_sum, score=leave_one_out_score),
    "normalize_then_sum": normalize_then_sum,
    "opo": opo,
    "raw": raw,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "relative_to_mean": relative_to_mean,
    "rloo": rloo,
    "rloo_scaled": rloo_scaled,
}
"""`Axis.ROWS`; the returns of a row are its advantages."""

TOKEN_ESTIMATORS: dict[str, TokenEstimator] = {
    "masked_gae": TokenEstimator(masked_gae, gae_returns),
    "optimal_token_baseline": TokenEstimator(optimal_token_baseline, rewards_to_go),
    "reinforce_plus_plus": TokenEstimator(reinforce_plus_plus, discounted_returns),
    "remax": TokenEstimator(remax, rewards_to_go),
    "as_stored": TokenEstimator(as_stored, as_stored),
    "group_scores_to_go": TokenEstimator(scores_to_go, scores_to_go),
    "scores_to_go": TokenEstimator(scores_to_go, scores_to_go),
    "tir_optimal_token_baseline": TokenEstimator(tir_optimal_token_baseline, rewards_to_go),
}
"""`Axis.TRAINED_TOKENS`."""

RESPONSE_ESTIMATORS: dict[str, Callable[[ResponseScores, AdvantageRule], Tensor]] = {
    "discounted_token_returns": discounted_token_returns,
    "discounted_returns_all_penalised": partial(discounted_token_returns, everywhere=True),
    "gae": gae,
    "gae_of_masked": gae_of_masked,
    "gae_of_trained": gae_of_trained,
    "group_scores_of_tokens": group_scores_of_tokens,
    "penalised_group_scores": penalised_group_scores,
    "penalised_scores": penalised_scores,
    "response_returns": response_returns,
    "returns_of_group_scores": returns_of_scores,
    "returns_of_scores": returns_of_scores,
    "scores_of_tokens": scores_of_tokens,
}
"""`Axis.ALL_TOKENS`."""

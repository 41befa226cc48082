"""Every estimator by name: those with one advantage per row, and those with one per token."""

from collections.abc import Callable

from torch import Tensor

from rolloutdoctor.formulas.advantages.gdpo import gdpo
from rolloutdoctor.formulas.advantages.grpo import gpg, grpo, grpo_passk, raw, reinforce_plus_plus_baseline
from rolloutdoctor.formulas.advantages.leave_one_out import rloo
from rolloutdoctor.formulas.advantages.normalised import normalize_then_sum
from rolloutdoctor.formulas.advantages.opo import opo
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores
from rolloutdoctor.formulas.advantages.token_baselines import optimal_token_baseline, tir_optimal_token_baseline
from rolloutdoctor.formulas.advantages.tokens import (
    TokenScores,
    discounted_returns,
    gae_returns,
    masked_gae,
    reinforce_plus_plus,
    remax,
    rewards_to_go,
)
from rolloutdoctor.objective.objective import AdvantageRule

ESTIMATORS: dict[str, Callable[[Scores, AdvantageRule], Advantages]] = {
    "gdpo": gdpo,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "normalize_then_sum": normalize_then_sum,
    "opo": opo,
    "raw": raw,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
}

TOKEN_ESTIMATORS: dict[str, Callable[[TokenScores, AdvantageRule], Tensor]] = {
    "masked_gae": masked_gae,
    "optimal_token_baseline": optimal_token_baseline,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}
"""What they need beyond rewards and mask is in `rolloutdoctor.objective.required_columns.TOKEN_COLUMNS`."""

RETURNS: dict[str, Callable[[TokenScores, AdvantageRule], Tensor]] = {
    "masked_gae": gae_returns,
    "optimal_token_baseline": rewards_to_go,
    "reinforce_plus_plus": discounted_returns,
    "remax": rewards_to_go,
    "tir_optimal_token_baseline": rewards_to_go,
}
"""What verl calls their returns, ``[V]`` each; those of an estimator with one advantage per row are its advantages."""

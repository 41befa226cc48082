"""GDPO: every reward is normalised within its group before the rewards are added up."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.grpo import grpo
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores
from rolloutdoctor.formulas.advantages.whitening import whiten
from rolloutdoctor.objective.objective import AdvantageRule


def gdpo(scores: Scores, rule: AdvantageRule) -> Advantages:
    """Weighted sum of GRPO's advantages of each reward, whitened over the trained tokens of the step.

    Rewards that are normalised one by one see no KL penalty, wherever the configuration puts it. The baseline is what
    GRPO subtracts, weighted like the advantages. Without named rewards the score is the only one.

    Source: arXiv 2601.05242; verl ``compute_gdpo_outcome_advantage``.

    Raises:
        CannotComputeError: for fewer than two trained tokens, where verl fails.
    """
    parts_N: list[Tensor] = [*scores.named.values()] or [scores.score_N]
    weights = rule.reward_weights or (1.0,) * len(parts_N)
    value_N = torch.zeros_like(scores.score_N)
    baseline_N = torch.zeros_like(scores.score_N)
    for weight, part_N in zip(weights, parts_N, strict=False):
        advantages = grpo(scores.of(part_N), rule)
        value_N = value_N + weight * advantages.value_N
        baseline_N = baseline_N + weight * advantages.baseline_N
    return Advantages(whiten(value_N, scores.length_N, scores.population), baseline_N)

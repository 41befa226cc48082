"""The correction that a policy term makes by itself, with the log-probs at the loss (verl's bypass mode)."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.corrections.importance import importance_metrics, importance_weights
from rolloutdoctor.formulas.corrections.masked import LogRatios
from rolloutdoctor.formulas.corrections.mismatch import mismatch_metrics
from rolloutdoctor.formulas.corrections.rejection import kept_tokens, rejection_metrics
from rolloutdoctor.objective.corrections import RolloutCorrection


def inside_the_loss(
    ratios: LogRatios, rule: RolloutCorrection, together_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens that are kept, ``[T]`` bool, and what the policy term is multiplied by, ``[T]``: 0 where not kept.

    Weights and statistics are those of the mask before this rejection. Source: verl
    ``compute_policy_loss_bypass_mode``.

    Args:
        ratios: log-probs at the loss minus the sampler's, a part for each micro-batch.
        rule: bounds of weights and rejections.
        together_N: ``[N]`` int64, the row's micro-batch with those that other ranks ran at the same time: the mean
            that weights are divided by is over all of them.

    Raises:
        CannotComputeError: if a micro-batch has no token, or no weight above 0, where verl fails.
    """
    kept_T = kept_tokens(ratios, rule.rejections)
    gate_T = kept_T.to(ratios.value_T.dtype)
    if rule.weights is not None:
        weights = importance_weights(ratios, rule.weights, together_N)
        if rule.weighs:
            gate_T = torch.where(kept_T, weights.value_T, 0.0)
    return kept_T, gate_T


def inside_metrics(
    ratios: LogRatios, rule: RolloutCorrection, together_N: Tensor | None, trainer_T: Tensor, sampler_T: Tensor
) -> dict[str, Tensor]:
    """Compute what the loss of each micro-batch logs about it, ``[M]`` each, without the prefix ``rollout_corr/``.

    Source: verl ``compute_rollout_correction_and_rejection_mask``.
    """
    metrics: dict[str, Tensor] = {}
    if rule.weights is not None:
        metrics |= importance_metrics(ratios, rule.weights, importance_weights(ratios, rule.weights, together_N))
    if rule.rejections:
        metrics |= rejection_metrics(ratios, rule.rejections)
    return metrics | mismatch_metrics(ratios, trainer_T, sampler_T)

"""The correction that a policy term makes by itself, with the log-probs at the loss (verl's bypass mode)."""

import torch
from torch import Tensor

from rolloutdoctor.corrections.importance import importance_weights
from rolloutdoctor.corrections.masked import LogRatios
from rolloutdoctor.corrections.rejection import kept_tokens
from rolloutdoctor.objective import RolloutCorrection


def inside_the_loss(ratios: LogRatios, rule: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """Tokens that are kept, ``[T]`` bool, and what the policy term is multiplied by, ``[T]``: 0 where not kept.

    Weights and statistics are those of the mask before this rejection. Source: verl
    ``compute_policy_loss_bypass_mode``.
    """
    kept_T = kept_tokens(ratios, rule.rejections)
    gate_T = kept_T.to(ratios.value_T.dtype)
    if rule.weights is not None:
        gate_T = torch.where(kept_T, importance_weights(ratios, rule.weights).value_T, 0.0)
    return kept_T, gate_T

"""Weights of tokens by how far the policy moved in the tokens that follow: FIPO's influence weight."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.levels import log_weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops.scan import reverse_scan


def future_kl(inputs: TokenInputs, mask_T: Tensor, offsets: Tensor, gate: TermWeight, rule: Surrogate) -> Tensor:
    """Discounted sum of the log-ratios from each trained token on, ``[V]`` float64: masked tokens pass time alone.

    A token whose ratio is above the gate's cap adds nothing. Source: ms-swift ``_compute_fipo_influence``
    (swift/rlhf_trainers/grpo_trainer.py).

    Args:
        inputs: the trained tokens of the step.
        mask_T: ``[T]`` bool, which of all response tokens these are.
        offsets: ``[N+1]`` int64 row offsets of all response tokens.
        gate: decay per token, and the cap.
        rule: whose ratio is compared with the cap.
    """
    log_ratio_V = inputs.log_ratio_T
    if gate.cap is not None:
        log_ratio_V = torch.where(log_weights(inputs, rule).exp() > gate.cap, 0.0, log_ratio_V)
    every_T = torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    every_T[mask_T] = log_ratio_V.double()
    return reverse_scan(every_T, gate.decay, offsets)[mask_T]


def kept_safe(inputs: TokenInputs, gate: TermWeight, rule: Surrogate) -> Tensor:
    """Tokens that are not both of a negative advantage and of a ratio above the gate's, ``[V]`` bool."""
    if gate.safe_ratio is None:
        return torch.ones_like(inputs.log_ratio_T, dtype=torch.bool)
    return ~((inputs.advantage_T < 0) & (log_weights(inputs, rule).exp() > gate.safe_ratio))


def influence(inputs: TokenInputs, mask_T: Tensor, offsets: Tensor, gate: TermWeight, rule: Surrogate) -> Tensor:
    """Weights ``exp(future KL)`` within bounds, and within 0.8 to 1 where they are not safe, ``[V]``."""
    weight_V = future_kl(inputs, mask_T, offsets, gate, rule).exp()
    if gate.low is not None or gate.high is not None:
        weight_V = weight_V.clamp(gate.low, gate.high)
    weight_V = torch.where(kept_safe(inputs, gate, rule), weight_V, weight_V.clamp(0.8, 1.0))
    return weight_V.to(inputs.policy_T.dtype)

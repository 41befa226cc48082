"""clip_cov and kl_cov: tokens whose log-prob and advantage vary together are treated apart.

The tokens are chosen over the whole micro-batch: see `rolloutdoctor.formulas.losses.selections`.
"""

import torch

from rolloutdoctor.formulas.losses.ratio import share_of_first, unmoved
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def clip_cov(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``max(-A r, -A clip(r))``, and 0 for the chosen tokens, which its clip metric counts; no dual clip.

    Source: verl ``compute_policy_loss_clip_cov``.
    """
    assert inputs.chosen_T is not None  # the kind is in the table of selections
    advantage_T, ratio_T = inputs.advantage_T, inputs.log_ratio_T.exp()
    free_T = -advantage_T * ratio_T
    near_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    bound_T = -advantage_T * near_T
    free_share_T = share_of_first(free_T, bound_T)
    flows_T = free_share_T + (1 - free_share_T) * unmoved(ratio_T, near_T)
    left_T = ~inputs.chosen_T
    return PolicyTerm(
        value_T=inputs.gated(torch.maximum(free_T, bound_T) * left_T),
        slope_T=inputs.gated(free_T * flows_T * left_T),
        ratio_T=ratio_T,
        at_one_T=inputs.gated(-advantage_T * left_T),
        clipped_T=inputs.chosen_T,
        drift_T=-inputs.log_ratio_T,
    )


def kl_cov(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A r``, never clipped, and for the chosen tokens plus `coef` times the absolute log-ratio.

    `coef` is in `numbers`. A chosen token without advantage has a gradient; a token whose ``-A r`` is infinite has none
    that is a number, because verl makes both terms of every token, and autograd takes the unused one times 0. The
    drift that it logs is the absolute one. Source: verl and SkyRL ``compute_policy_loss_kl_cov``.
    """
    assert inputs.chosen_T is not None  # the kind is in the table of selections
    delta_T = inputs.log_ratio_T
    ratio_T = delta_T.exp()
    free_T = -inputs.advantage_T * ratio_T
    coef: float | torch.Tensor = rule.numbers["coef"]
    if inputs.unweighed_T is not None:
        # SkyRL divides the advantages by the tokens, and this by nothing.
        coef = coef * inputs.unweighed_T
    chosen_T = inputs.chosen_T
    return PolicyTerm(
        value_T=inputs.gated(free_T + torch.where(chosen_T, coef * delta_T.abs(), 0.0)),
        slope_T=inputs.gated(free_T + 0 * free_T + torch.where(chosen_T, coef * delta_T.sign(), 0.0)),
        ratio_T=ratio_T,
        drift_T=delta_T.abs(),
    )

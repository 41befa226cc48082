"""DPPO: the log-prob times a truncated ratio, for tokens whose probability has not moved too far.

``value = -A * min(r, cap) * log-prob * valid``, where ratio and `valid` are detached. The clip range bounds a
divergence and not the ratio; `cap` truncates the ratio. With `live` in `numbers` it is ``-A * r * valid``, r with its
derivative and without a cap.
"""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.ratio import bounded, importance_ratio
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def dppo_tv(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """A token is valid while its probability rose by at most `clip_high` (fell by at most `clip_low`).

    Source: verl ``compute_policy_loss_dppo_tv``. Its comment recommends a cap of 20; verl's default of 3 is what runs.
    """
    risen_T = given.policy_T.exp() - given.old_T.exp()
    valid_T = torch.where(given.advantage_T > 0, risen_T <= rule.clip_high, risen_T >= -rule.clip_low)
    return _truncated(given, rule, valid_T)


def dppo_kl(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """`dppo_tv` with the KL between the two-point distributions "this token or another" as the distance.

    A move towards the old policy is always valid. Source: verl ``compute_policy_loss_dppo_kl``.
    """
    new_T, old_T = given.policy_T.exp(), given.old_T.exp()
    # In the order of upstream's operations: where probabilities are close to one the rounding decides.
    others_T = torch.log((1.0 - old_T + 1e-8) / (1.0 - new_T + 1e-8))
    distance_T = old_T * (given.old_T - given.policy_T) + (1 - old_T) * others_T
    rise_T = (distance_T <= rule.clip_high) | (new_T <= old_T)
    fall_T = (distance_T <= rule.clip_low) | (new_T >= old_T)
    return _truncated(given, rule, torch.where(given.advantage_T > 0, rise_T, fall_T))


def _truncated(given: TokenInputs, rule: Surrogate, valid_T: Tensor) -> PolicyTerm:
    if rule.numbers.get("live"):
        return _live(given, rule, valid_T)
    delta_T = bounded(given.log_ratio_T, rule)
    ratio_T = delta_T.exp()
    weight_T = -given.advantage_T * ratio_T.clamp(max=rule.cap)
    return PolicyTerm(
        value_T=given.gated(weight_T * given.policy_T * valid_T),
        slope_T=given.gated(weight_T * valid_T),
        ratio_T=ratio_T,
        at_one_T=given.gated(-given.advantage_T * given.policy_T),
        clipped_T=~valid_T,
        capped_T=valid_T & (ratio_T > rule.cap) if rule.cap is not None else torch.zeros_like(valid_T),
        drift_T=-delta_T,
    )


def _live(given: TokenInputs, rule: Surrogate, valid_T: Tensor) -> PolicyTerm:
    """``-A r valid``, the gradient flowing through the ratio. Source: SkyRL ``dppo_policy_loss``."""
    ratio_T, slope_T = importance_ratio(given.log_ratio_T, rule)
    against_T = -given.advantage_T * valid_T
    return PolicyTerm(
        given.gated(against_T * ratio_T),
        given.gated(against_T * slope_T),
        ratio_T,
        clipped_T=~valid_T & (given.advantage_T != 0),
    )

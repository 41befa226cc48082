"""DPPO: the log-prob times a truncated ratio, for tokens whose probability has not moved too far.

``value = -A * min(r, cap) * log-prob * valid``, where ratio and `valid` are detached. The clip range bounds a
divergence and not the ratio; `cap` truncates the ratio. With `Surrogate.live_ratio` the term is ``-A * r * valid``.
With `nonzero_clip` in `numbers` the metric counts no clipped token whose advantage is 0.
"""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.ratio import bounded, unmoved
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def dppo_tv(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """A token is valid while its probability rose by at most `clip_high` (fell by at most `clip_low`).

    Source: arXiv 2602.04879; verl ``compute_policy_loss_dppo_tv``, prime-rl ``default_loss_fn``. verl's comment
    recommends a cap of 20; its default of 3 is what runs.
    """
    risen_T = inputs.policy_T.exp() - inputs.old_T.exp()
    valid_T = torch.where(inputs.advantage_T > 0, risen_T <= rule.clip_high, risen_T >= -rule.clip_low)
    return _truncated(inputs, rule, valid_T)


def probability_band(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """A token is valid while its probability is within `clip_low` below and `clip_high` above, whatever the advantage.

    Source: prime-rl ``ipo_loss_fn``.
    """
    risen_T = inputs.policy_T.exp() - inputs.old_T.exp()
    return _truncated(inputs, rule, (risen_T <= rule.clip_high) & (risen_T >= -rule.clip_low))


def dppo_kl(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """`dppo_tv` with the KL between the two-point distributions "this token or another" as the distance.

    A move towards the old policy is always valid. Source: verl ``compute_policy_loss_dppo_kl``.
    """
    new_T, old_T = inputs.policy_T.exp(), inputs.old_T.exp()
    # In the order of upstream's operations: where probabilities are close to one the rounding decides.
    others_T = torch.log((1.0 - old_T + 1e-8) / (1.0 - new_T + 1e-8))
    distance_T = old_T * (inputs.old_T - inputs.policy_T) + (1 - old_T) * others_T
    rise_T = (distance_T <= rule.clip_high) | (new_T <= old_T)
    fall_T = (distance_T <= rule.clip_low) | (new_T >= old_T)
    return _truncated(inputs, rule, torch.where(inputs.advantage_T > 0, rise_T, fall_T))


def _truncated(inputs: TokenInputs, rule: Surrogate, valid_T: Tensor) -> PolicyTerm:
    delta_T = bounded(inputs.log_ratio_T, rule)
    ratio_T = delta_T.exp()
    capped_T = ratio_T if rule.cap is None else ratio_T.clamp(max=rule.cap)
    # 0 times an infinite ratio is NaN, in the trainers too.
    weight_T = -inputs.advantage_T * capped_T * valid_T
    if rule.live_ratio:
        moves_T = unmoved(inputs.log_ratio_T, delta_T)
        if rule.cap is not None:
            moves_T = moves_T * unmoved(ratio_T, capped_T)
        value_T, slope_T, at_one_T = weight_T, weight_T * moves_T, None
    else:
        value_T, slope_T, at_one_T = (
            weight_T * inputs.policy_T,
            weight_T,
            inputs.gated(-inputs.advantage_T * inputs.policy_T),
        )
    return PolicyTerm(
        value_T=inputs.gated(value_T),
        slope_T=inputs.gated(slope_T),
        ratio_T=ratio_T,
        at_one_T=at_one_T,
        clipped_T=~valid_T & (inputs.advantage_T != 0) if rule.numbers.get("nonzero_clip") else ~valid_T,
        capped_T=valid_T & (ratio_T > rule.cap) if rule.cap is not None else torch.zeros_like(valid_T),
        drift_T=-delta_T,
    )

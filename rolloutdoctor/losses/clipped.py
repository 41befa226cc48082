"""PPO's clipped term, with the second bound that each trainer puts on it."""

import torch

from rolloutdoctor.losses.levels import gathered, log_weights
from rolloutdoctor.losses.ratio import bounded, importance_ratio, share_of_first, unmoved
from rolloutdoctor.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective import Surrogate


def ppo_dual_clip(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``max(-A r, -A clip(r))``, and for a negative advantage at most ``-A cap``.

    Source: verl ``compute_policy_loss_vanilla``; slime ``compute_policy_loss`` (whose cap is off by default
    and whose gspo has one ratio per row).
    """
    advantage_T, log_T = given.advantage_T, log_weights(given, rule)
    ratio_T, slope_T = importance_ratio(log_T, rule)
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    free_T, bound_T = -advantage_T * ratio_T, -advantage_T * clipped_T
    value_T = torch.maximum(free_T, bound_T)
    capped_T = None
    free_share_T = share_of_first(free_T, bound_T)
    flows_T = free_share_T + (1 - free_share_T) * unmoved(ratio_T, clipped_T)
    if rule.cap is not None:
        negative_T, limit_T = advantage_T < 0, -advantage_T * rule.cap
        capped_T = negative_T & (value_T > limit_T)
        # At a tie the limit, which has no derivative, gets one half.
        flows_T = torch.where(negative_T, flows_T * share_of_first(limit_T, value_T), flows_T)
        value_T = torch.where(negative_T, torch.minimum(value_T, limit_T), value_T)
    return PolicyTerm(
        value_T=given.gated(value_T),
        slope_T=gathered(given, rule, given.gated(-advantage_T * slope_T * flows_T)),
        ratio_T=ratio_T,
        clipped_T=bound_T > free_T,
        capped_T=capped_T,
        drift_T=-bounded(log_T, rule),
    )


def ppo_delta_clip(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-min(min(r, cap) A, clip(r) A)``, the cap being TRL's `delta`.

    Source: TRL ``GRPOTrainer._compute_loss`` for grpo, bnpo, dr_grpo, dapo and luspo.
    """
    advantage_T, log_T = given.advantage_T, log_weights(given, rule)
    ratio_T, slope_T = importance_ratio(log_T, rule)
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    capped_T = ratio_T if rule.cap is None else ratio_T.clamp(max=rule.cap)
    first_T, second_T = -capped_T * advantage_T, -clipped_T * advantage_T
    first_share_T = share_of_first(first_T, second_T)
    flows_T = first_share_T if rule.cap is None else first_share_T * unmoved(ratio_T, capped_T)
    flows_T = flows_T + (1 - first_share_T) * unmoved(ratio_T, clipped_T)
    value_T = torch.maximum(first_T, second_T)
    gathered_T = gathered(given, rule, given.gated(-advantage_T * slope_T * flows_T))
    return PolicyTerm(given.gated(value_T), gathered_T, capped_T)

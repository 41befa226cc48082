"""Policy terms: the value per token and its derivative with respect to the policy's log-prob."""

from collections.abc import Callable

import torch

from rolloutdoctor.losses import verl_covariance, verl_dppo, verl_log_prob, verl_sequence, verl_soft
from rolloutdoctor.losses.ratio import bounded, importance_ratio
from rolloutdoctor.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective import Surrogate


def ppo_dual_clip(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``max(-A r, -A clip(r))``, and for a negative advantage at most ``-A cap``.

    Source: verl ``compute_policy_loss_vanilla``; slime ``compute_policy_loss`` (whose cap is off by default).
    """
    advantage_T = given.advantage_T
    ratio_T, slope_T = importance_ratio(given.log_ratio_T, rule)
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    free_T, bound_T = -advantage_T * ratio_T, -advantage_T * clipped_T
    value_T = torch.maximum(free_T, bound_T)
    capped_T = None
    negative_T = advantage_T < 0
    flows_T = torch.where(negative_T, ratio_T >= 1 - rule.clip_low, ratio_T <= 1 + rule.clip_high)
    if rule.cap is not None:
        capped_T = negative_T & (value_T > -advantage_T * rule.cap)
        value_T = torch.where(negative_T, torch.minimum(value_T, -advantage_T * rule.cap), value_T)
        flows_T = flows_T & (~negative_T | (ratio_T <= rule.cap))
    return PolicyTerm(
        value_T=given.gated(value_T),
        slope_T=given.gated(torch.where(flows_T, -advantage_T * slope_T, 0.0)),
        ratio_T=ratio_T,
        clipped_T=bound_T > free_T,
        capped_T=capped_T,
        drift_T=-bounded(given.log_ratio_T, rule),
    )


def ppo_delta_clip(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-min(min(r, cap) A, clip(r) A)``, the cap being TRL's `delta`.

    Source: TRL ``GRPOTrainer._compute_loss`` for grpo, bnpo, dr_grpo and dapo.
    """
    advantage_T = given.advantage_T
    ratio_T, slope_T = importance_ratio(given.log_ratio_T, rule)
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    inside_T = (ratio_T >= 1 - rule.clip_low) & (ratio_T <= 1 + rule.clip_high)
    if rule.cap is not None:
        capped_T = ratio_T.clamp(max=rule.cap)
        below_T = ratio_T <= rule.cap
    else:
        capped_T, below_T = ratio_T, torch.ones_like(inside_T)
    first_T, second_T = -capped_T * advantage_T, -clipped_T * advantage_T
    # Where both branches are equal autograd gives each one half.
    share_T = torch.where(first_T > second_T, 1.0, torch.where(first_T == second_T, 0.5, 0.0))
    flows_T = share_T * below_T + (1 - share_T) * inside_T
    value_T = torch.maximum(first_T, second_T)
    return PolicyTerm(given.gated(value_T), given.gated(-advantage_T * slope_T * flows_T), capped_T)


SURROGATES: dict[str, Callable[[TokenInputs, Surrogate], PolicyTerm]] = {
    "ppo_delta_clip": ppo_delta_clip,
    "ppo_dual_clip": ppo_dual_clip,
    "verl_cispo": verl_log_prob.cispo,
    "verl_clip_cov": verl_covariance.clip_cov,
    "verl_dppo_kl": verl_dppo.dppo_kl,
    "verl_dppo_tv": verl_dppo.dppo_tv,
    "verl_dro": verl_log_prob.dro,
    "verl_geo_mean": verl_sequence.geo_mean,
    "verl_gpg": verl_log_prob.gpg,
    "verl_gspo": verl_sequence.gspo,
    "verl_kl_cov": verl_covariance.kl_cov,
    "verl_reinforce": verl_log_prob.reinforce,
    "verl_sapo": verl_soft.sapo,
}

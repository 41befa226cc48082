"""Terms that weigh the log-prob itself: gpg, reinforce, dro and the two forms of cispo.

Their value moves with the log-probs, not around the advantage, so the size of the loss says little; the derivative
is what counts.
"""

import torch

from rolloutdoctor.formulas.losses.levels import log_weights
from rolloutdoctor.formulas.losses.ratio import bounded
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def gpg(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * log-prob``; no ratio, and no metric. Source: verl ``compute_policy_loss_gpg``."""
    value_T = inputs.gated(-inputs.policy_T * inputs.advantage_T)
    one_T = torch.ones_like(value_T)
    return PolicyTerm(value_T, inputs.gated(-inputs.advantage_T), one_T, at_one_T=value_T)


def reinforce(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * log-prob`` times the importance weights in the gate; logs the drift from the sampler.

    Source: verl ``compute_policy_loss_reinforce``.
    """
    return gpg(inputs, rule)._replace(drift_T=-inputs.log_ratio_T)


def dro(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * log-prob + beta / 2 * log-ratio^2``, `beta` being in `numbers`.

    A token without advantage is still pulled back to the old policy. Source: verl ``compute_policy_loss_dro``.
    """
    beta, delta_T = rule.numbers["beta"], inputs.log_ratio_T
    weighted_T = inputs.policy_T * inputs.advantage_T
    return PolicyTerm(
        value_T=inputs.gated(-(weighted_T - 0.5 * beta * delta_T.square())),
        slope_T=inputs.gated(-inputs.advantage_T + beta * delta_T),
        ratio_T=delta_T.exp(),
        at_one_T=inputs.gated(-weighted_T),
        drift_T=-delta_T,
    )


def cispo_clipped(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-clip(r) * A * log-prob``, the clipped ratio detached: no token loses its gradient.

    Source: verl ``compute_policy_loss_cispo``.
    """
    delta_T = bounded(inputs.log_ratio_T, rule)
    ratio_T = delta_T.exp()
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    weight_T = -clipped_T * inputs.advantage_T
    return PolicyTerm(
        value_T=inputs.gated(weight_T * inputs.policy_T),
        slope_T=inputs.gated(weight_T),
        ratio_T=clipped_T,
        at_one_T=inputs.gated(-inputs.advantage_T * inputs.policy_T),
        clipped_T=ratio_T != clipped_T,
        capped_T=torch.zeros_like(inputs.policy_T, dtype=torch.bool),
        drift_T=-delta_T,
    )


def windowed(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-r * A * log-prob``, the ratio detached, 0 for ratios that are not within both bounds (GLM-5's loss).

    Source: SkyRL ``rollout_is_policy_loss``.
    """
    ratio_T = bounded(inputs.log_ratio_T, rule).exp()
    inside_T = (ratio_T > 1 - rule.clip_low) & (ratio_T < 1 + rule.clip_high)
    weight_T = torch.where(inside_T, -ratio_T * inputs.advantage_T, 0.0)
    return PolicyTerm(
        value_T=inputs.gated(weight_T * inputs.policy_T),
        slope_T=inputs.gated(weight_T),
        ratio_T=ratio_T,
        at_one_T=inputs.gated(-inputs.advantage_T * inputs.policy_T),
        clipped_T=~inside_T,
    )


def cispo_capped(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-min(r, epsilon_high) * A * log-prob``, the weight detached: no token loses its gradient.

    The bound is `clip_high` itself and not one plus it, as TRL has it: with the default of 0.2 every gradient is a
    fifth of what it would be at ratio one. No lower bound. Source: TRL ``GRPOTrainer._compute_loss``.
    """
    free_T = log_weights(inputs, rule).exp()
    ratio_T = free_T.clamp(max=rule.clip_high)
    weighted_T = inputs.advantage_T * inputs.policy_T
    return PolicyTerm(
        value_T=inputs.gated(-ratio_T * weighted_T),
        slope_T=inputs.gated(-ratio_T * inputs.advantage_T),
        ratio_T=ratio_T,
        at_one_T=inputs.gated(-min(1.0, rule.clip_high) * weighted_T),
        clipped_T=(free_T > rule.clip_high) & (inputs.advantage_T > 0),
    )

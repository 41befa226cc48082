"""TRL's policy terms beyond the clipped one: cispo, sapo, vespo, and the term per row of its RLOOTrainer."""

import math

import torch

from rolloutdoctor.formulas.losses.clipped import ppo_delta_clip
from rolloutdoctor.formulas.losses.levels import gathered, lengths, log_weights
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate

SMALLEST = math.log(1e-8)
"""Lower bound that vespo puts on the log of a weight; the upper one is 20."""


def cispo(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-min(r, epsilon_high) * A * log-prob``, the weight detached: no token loses its gradient.

    The bound is `clip_high` itself and not one plus it, as TRL has it: with the default of 0.2 every gradient is a
    fifth of what it would be at ratio one. No lower bound. Source: TRL ``GRPOTrainer._compute_loss``.
    """
    free_T = log_weights(given, rule).exp()
    ratio_T = free_T.clamp(max=rule.clip_high)
    weighted_T = given.advantage_T * given.policy_T
    return PolicyTerm(
        value_T=given.gated(-ratio_T * weighted_T),
        slope_T=given.gated(-ratio_T * given.advantage_T),
        ratio_T=ratio_T,
        at_one_T=given.gated(-min(1.0, rule.clip_high) * weighted_T),
        clipped_T=(free_T > rule.clip_high) & (given.advantage_T > 0),
    )


def sapo(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * 4 / tau * sigmoid(tau (r - 1))``, tau being `tau_pos` or, unless A > 0, `tau_neg` in `numbers`.

    At ratio one its derivative is minus the advantage and its value ``-2 A / tau``. Source: TRL
    ``GRPOTrainer._compute_loss``, which clamps no log-ratio and logs no clip metrics.
    """
    advantage_T = given.advantage_T
    ratio_T = log_weights(given, rule).exp()
    pair = torch.tensor([rule.numbers["tau_pos"], rule.numbers["tau_neg"]], dtype=ratio_T.dtype, device=ratio_T.device)
    tau_T = torch.where(advantage_T > 0, pair[0], pair[1])
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    return PolicyTerm(
        value_T=given.gated(-(gate_T * 4 / tau_T) * advantage_T),
        slope_T=gathered(given, rule, given.gated(-advantage_T * 4 * ratio_T * gate_T * (1 - gate_T))),
        ratio_T=ratio_T,
        at_one_T=given.gated(-2 * advantage_T / tau_T),
    )


def vespo(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-phi * A * log-prob``, phi a detached weight of the row: ``exp(lambda - lambda w) w^k``.

    w is the product of the row's ratios, of policy to old and, where the sampler is corrected for, of old to sampler
    (`TokenInputs.log_weight_N`); k and lambda go with the sign of the advantage. It is the same at either level of
    importance sampling. Source: TRL ``GRPOTrainer.get_gamma_weights``.
    """
    advantage_T = given.advantage_T
    log_N = given.row_sum(given.log_ratio_T.clamp(-20.0, 20.0))
    if given.log_weight_N is not None:
        log_N = log_N + given.log_weight_N
    log_T = given.expand(log_N).clamp(SMALLEST, 20.0)
    positive_T = advantage_T >= 0
    k, decay = (
        torch.tensor([rule.numbers[f"{name}_pos"], rule.numbers[f"{name}_neg"]], dtype=log_T.dtype, device=log_T.device)
        for name in ("k", "lambda")
    )
    power_T = torch.where(positive_T, k[0], k[1])
    decay_T = torch.where(positive_T, decay[0], decay[1]).clamp(min=1e-4)
    phi_T = torch.exp(decay_T + power_T * log_T - decay_T * log_T.exp()).nan_to_num(0.0, 0.0, 0.0)
    value_T = -phi_T * advantage_T * given.policy_T
    return PolicyTerm(
        value_T=given.gated(value_T),
        slope_T=given.gated(-phi_T * advantage_T),
        ratio_T=phi_T,
        at_one_T=given.gated(-advantage_T * given.policy_T),
        logged_T=phi_T,
    )


def rloo(given: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """One clipped term per row, its ratio the product of the row's: ``-min(r A, clip(r) A)``.

    Each token's value is its share of the row's term, so that they add up to it. Source: TRL
    ``RLOOTrainer._compute_loss``.
    """
    share_T = given.expand(1 / lengths(given))
    term = ppo_delta_clip(given, rule)
    return term._replace(
        value_T=term.value_T * share_T,
        slope_T=term.slope_T * share_T,
        at_one_T=given.gated(-given.advantage_T) * share_T,
    )

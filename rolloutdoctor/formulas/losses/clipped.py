"""PPO's clipped term, with the second bound that each trainer puts on it.

Within the bounds every clamp leaves the ratio as it is, both sides of the maximum are equal, and the derivative is that
of ``-A r``: so the bounds are worked out for the few tokens that lie outside.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.levels import gathered
from rolloutdoctor.formulas.losses.ratio import bounded, share_of_first, unmoved, weights
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops import elementwise as el

Bounded = Callable[[Tensor, Tensor, Surrogate], tuple[Tensor, ...]]
"""Ratio and advantage, ``[P]`` each, to the term, the share of the ratio's derivative that flows, and counts."""


def ppo_dual_clip(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``max(-A r, -A clip(r))``, and for a negative advantage at most ``-A cap``.

    Source: verl ``compute_policy_loss_vanilla``; slime ``compute_policy_loss`` (whose cap is off by default
    and whose gspo has one ratio per row).
    """
    log_T, ratio_T, slope_T = weights(inputs, rule)
    counts = [torch.zeros_like(ratio_T, dtype=torch.bool) for _ in range(1 if rule.cap is None else 2)]
    value_T, turned_T = _clipped(inputs, rule, (ratio_T, slope_T), _dual, counts)
    return PolicyTerm(
        value_T=inputs.gated(value_T),
        slope_T=gathered(inputs, rule, inputs.gated(turned_T)),
        ratio_T=ratio_T,
        clipped_T=counts[0],
        capped_T=None if rule.cap is None else counts[1],
        drift_T=-bounded(log_T, rule),
    )


def ppo_delta_clip(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-min(min(r, cap) A, clip(r) A)``, the cap being TRL's `delta`.

    Source: TRL ``GRPOTrainer._compute_loss`` for the loss types that clip.
    """
    _, ratio_T, slope_T = weights(inputs, rule)
    value_T, turned_T = _clipped(inputs, rule, (ratio_T, slope_T), _delta, [])
    capped_T = ratio_T if rule.cap is None else ratio_T.clamp(max=rule.cap)
    return PolicyTerm(inputs.gated(value_T), gathered(inputs, rule, inputs.gated(turned_T)), capped_T)


def _clipped(
    inputs: TokenInputs, rule: Surrogate, ratio: tuple[Tensor, Tensor], bounds: Bounded, counts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The term and its derivative by the log-ratio, ``[T]`` each, before the gates.

    Args:
        inputs: the tokens.
        rule: where the bounds are.
        ratio: the importance ratio and its derivative.
        bounds: what becomes of a token outside of them.
        counts: ``[T]`` bool each, to be set where such a token is counted.
    """
    ratio_T, slope_T = ratio
    against_T = -inputs.advantage_T
    value_T = ratio_T * against_T
    turned_T = value_T if slope_T is ratio_T else slope_T * against_T
    places_P = el.outside(ratio_T, *_free_range(rule))
    if places_P is not None:
        advantage_P = inputs.advantage_T[places_P]
        value_P, flows_P, *counts_P = bounds(ratio_T[places_P], advantage_P, rule)
        turned_T = turned_T.clone() if turned_T is value_T else turned_T
        el.put(value_T, places_P, value_P)
        el.put(turned_T, places_P, -advantage_P * slope_T[places_P] * flows_P)
        for count_T, count_P in zip(counts, counts_P, strict=True):
            el.put(count_T, places_P, count_P)
    return value_T, turned_T


def _free_range(rule: Surrogate) -> tuple[float, float]:
    """The ratios within which the term is ``-A r``: below the lower or above the upper end it is to be looked at."""
    low, high = 1 - rule.clip_low, 1 + rule.clip_high
    if rule.cap is None or rule.cap > high * (1 + 1e-5):
        return low, high
    # Products with a ratio just below the cap may round to those with the cap: then every token is looked at.
    return low, -torch.inf


def _dual(ratio_P: Tensor, advantage_P: Tensor, rule: Surrogate) -> tuple[Tensor, ...]:
    clipped_P = ratio_P.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    free_P, bound_P = -advantage_P * ratio_P, -advantage_P * clipped_P
    value_P = torch.maximum(free_P, bound_P)
    free_share_P = share_of_first(free_P, bound_P)
    flows_P = free_share_P + (1 - free_share_P) * unmoved(ratio_P, clipped_P)
    if rule.cap is None:
        return value_P, flows_P, bound_P > free_P
    negative_P, limit_P = advantage_P < 0, -advantage_P * rule.cap
    capped_P = negative_P & (value_P > limit_P)
    # At a tie the limit, which has no derivative, gets one half.
    flows_P = torch.where(negative_P, flows_P * share_of_first(limit_P, value_P), flows_P)
    value_P = torch.where(negative_P, torch.minimum(value_P, limit_P), value_P)
    return value_P, flows_P, bound_P > free_P, capped_P


def _delta(ratio_P: Tensor, advantage_P: Tensor, rule: Surrogate) -> tuple[Tensor, ...]:
    clipped_P = ratio_P.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    capped_P = ratio_P if rule.cap is None else ratio_P.clamp(max=rule.cap)
    first_P, second_P = -capped_P * advantage_P, -clipped_P * advantage_P
    first_share_P = share_of_first(first_P, second_P)
    flows_P = first_share_P if rule.cap is None else first_share_P * unmoved(ratio_P, capped_P)
    flows_P = flows_P + (1 - first_share_P) * unmoved(ratio_P, clipped_P)
    return torch.maximum(first_P, second_P), flows_P

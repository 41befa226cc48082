"""Masked importance sampling: the log-prob times a detached ratio, where ratios of token and row are within bounds."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.levels import row_mean
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops import segments as seg

LARGEST_LOG_RATIO = 10.0
"""Bound on the log of the ratio of a row."""


def outside(inputs: TokenInputs, rule: Surrogate) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens that are left out, ``[T]`` bool, and those whose own ratio is below and above; their rows' extremes.

    Returns:
        Dropped tokens; tokens below and above `token_low` and `token_high`; the geometric mean of each row's ratios;
        ``[2, N]`` its smallest and largest ratio.
    """
    at, ratio_T = rule.numbers, inputs.log_ratio_T.exp()
    mean_T = row_mean(inputs, inputs.log_ratio_T).exp()
    offsets = inputs.runs.offsets
    ends_2N = torch.stack([seg.low(ratio_T, offsets), seg.high(ratio_T, offsets)])
    low_T, high_T = ratio_T < at["token_low"], ratio_T > at["token_high"]
    far_N = (ends_2N[0] < at["row_low"]) | (ends_2N[1] > at["row_high"])
    far_T = inputs.runs.expand(far_N) | (mean_T < at["mean_low"]) | (mean_T > at["mean_high"])
    return low_T | high_T | far_T, low_T, high_T, mean_T, ends_2N


def ratio_masked(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-w (a A - k d) * log-prob`` of the tokens that are kept; d is the log-ratio, and the factor is detached.

    The weight w is the token's ratio, or at level ``sequence-sum`` the product of its row's, at most `weight_high`. A
    token is left out where its ratio is outside `token_low` and `token_high`, the geometric mean of its row's outside
    `mean_low` and `mean_high`, or any of its row's outside `row_low` and `row_high`. The numbers a and k are
    `advantage` and `pull`: a token without advantage is still pulled back.

    Source: prime-rl 0.4 ``default_loss_fn``.
    """
    at, drift_T = rule.numbers, inputs.log_ratio_T
    ratio_T = drift_T.exp()
    weight_T = ratio_T
    if rule.level == "sequence-sum":
        product_N = inputs.row_sum(drift_T).clamp(max=LARGEST_LOG_RATIO).exp()
        weight_T = inputs.expand(product_N.clamp(max=at["weight_high"]))
    dropped_T = outside(inputs, rule)[0]
    factor_T = -weight_T * (at["advantage"] * inputs.advantage_T - at["pull"] * drift_T)
    slope_T = inputs.gated(torch.where(dropped_T, 0.0, factor_T))
    bare_T = -at["advantage"] * inputs.advantage_T * inputs.policy_T
    return PolicyTerm(
        value_T=slope_T * inputs.policy_T,
        slope_T=slope_T,
        ratio_T=weight_T,
        at_one_T=inputs.gated(bare_T),
        clipped_T=dropped_T,
    )

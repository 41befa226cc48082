"""Terms with one ratio per row: gspo, geo_mean and the clipped product of ratios."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.clipped import ppo_delta_clip
from rolloutdoctor.formulas.losses.levels import lengths
from rolloutdoctor.formulas.losses.ratio import share_of_first, unmoved
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate

LARGEST_LOG_RATIO = 10.0
"""verl's bound on the log of gspo's ratio of a row; beyond it there is no gradient."""


def gspo(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``max(-A s, -A clip(s))``, where s is the geometric mean of the row's ratios.

    The gradient goes straight through: each token's own log-prob is taken to have derivative s, and none flows
    through the mean. No dual clip. The mean is a float64 sum here and a float32 sum upstream, so a row whose ratio
    lies within float32 rounding of the clip range can fall on its other side. Source: verl
    ``compute_policy_loss_gspo``.
    """
    length_N = inputs.row_sum(torch.ones_like(inputs.policy_T)).clamp(min=1)
    log_T = inputs.expand(inputs.row_sum(inputs.log_ratio_T) / length_N)
    ratio_T = log_T.clamp(max=LARGEST_LOG_RATIO).exp()
    free_T = -inputs.advantage_T * ratio_T
    clipped_T = ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    bound_T = -inputs.advantage_T * clipped_T
    free_share_T = share_of_first(free_T, bound_T)
    flows_T = free_share_T + (1 - free_share_T) * unmoved(ratio_T, clipped_T)
    return PolicyTerm(
        value_T=inputs.gated(torch.maximum(free_T, bound_T)),
        slope_T=inputs.gated(torch.where(log_T <= LARGEST_LOG_RATIO, free_T * flows_T, 0.0)),
        ratio_T=ratio_T,
        clipped_T=bound_T > free_T,
        capped_T=torch.zeros_like(inputs.policy_T, dtype=torch.bool),
        drift_T=-inputs.log_ratio_T,
    )


def geo_mean(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """One term per row: minus the row's mean advantage times the geometric mean of its clipped ratios.

    The clip range bounds the log-ratio. A token's value is its own share of the mean advantage, so that values of a
    row add up to the row's term. Multipliers enter as their geometric mean over the row. A NaN advantage makes the
    term of its row NaN, and so the loss, even where no token of the row is trained. Source: verl
    ``compute_policy_loss_geo_mean``, which adds 1e-8 to the tokens of a row.
    """
    advantage_T, delta_T = inputs.advantage_T, inputs.log_ratio_T
    length_N = inputs.row_sum(torch.ones_like(inputs.policy_T)) + 1e-8
    near_T = delta_T.clamp(-rule.clip_low, rule.clip_high)
    rises_T, falls_T = advantage_T > 0, advantage_T < 0
    sign_T = advantage_T.sign()
    # Without advantage 0 times the log-ratio; of a NaN advantage NaN, and so is the ratio of its row.
    kept_T = sign_T * torch.minimum(sign_T * delta_T, sign_T * near_T)
    stops_T = (rises_T & (delta_T > rule.clip_high)) | (falls_T & (delta_T < -rule.clip_low))
    ratio_N = (inputs.row_sum(kept_T) / length_N).exp()
    ratio_T, share_T = inputs.expand(ratio_N), inputs.expand(_row_gates(inputs, length_N) / length_N)
    mean_T = inputs.expand(inputs.row_sum(advantage_T) / length_N)
    outside_T = delta_T != near_T
    return PolicyTerm(
        value_T=-advantage_T * ratio_T * share_T,
        # The clamp of a clipped token takes out what is not finite too; a factor of 0 does not.
        slope_T=torch.where(stops_T, 0.0, -mean_T * ratio_T * share_T * sign_T.square()),
        ratio_T=ratio_T,
        at_one_T=-advantage_T * share_T,
        clipped_T=outside_T & rises_T,
        capped_T=outside_T & falls_T,
        drift_T=-delta_T,
    )


def _row_gates(inputs: TokenInputs, length_N: Tensor) -> Tensor:
    """Geometric mean of the multipliers of each row, float64 ``[N]``; one without multipliers."""
    if inputs.gate_T is None:
        return torch.ones_like(length_N)
    return (inputs.row_sum(torch.log(inputs.gate_T + 1e-10)) / length_N).exp()


def clipped_row(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """One clipped term per row, its ratio the product of the row's: ``-min(r A, clip(r) A)``.

    Each token's value is its share of the row's term, so that they add up to it. Source: TRL
    ``RLOOTrainer._compute_loss``.
    """
    share_T = inputs.expand(1 / lengths(inputs))
    term = ppo_delta_clip(inputs, rule)
    return term._replace(
        value_T=term.value_T * share_T,
        slope_T=term.slope_T * share_T,
        at_one_T=inputs.gated(-inputs.advantage_T) * share_T,
    )

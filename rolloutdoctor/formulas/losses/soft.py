"""sapo, a smooth gate instead of a clip: with a ratio of the token or of the row, and with one of the token alone."""

import torch

from rolloutdoctor.formulas.losses.levels import gathered, log_weights
from rolloutdoctor.formulas.losses.ratio import bounded, importance_ratio
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def sapo_of_tokens(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * 4 / tau * sigmoid(tau (r - 1))``, tau being `tau_pos` or, unless A > 0, `tau_neg` in `numbers`.

    At ratio one its derivative is minus the advantage and its value ``-2 A / tau``. Both of its clip metrics are
    logged as 0. Source: verl ``compute_policy_loss_sapo``, which aggregates by seq-mean-token-mean whatever is set.
    """
    advantage_T = inputs.advantage_T
    ratio_T, slope_T = importance_ratio(inputs.log_ratio_T, rule)
    pair = torch.tensor([rule.numbers["tau_pos"], rule.numbers["tau_neg"]], dtype=ratio_T.dtype, device=ratio_T.device)
    tau_T = torch.where(advantage_T > 0, pair[0], pair[1])
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1.0))
    none_T = torch.zeros_like(inputs.policy_T, dtype=torch.bool)
    return PolicyTerm(
        value_T=inputs.gated(-gate_T * (4.0 / tau_T) * advantage_T),
        slope_T=inputs.gated(-advantage_T * slope_T * 4 * gate_T * (1 - gate_T)),
        ratio_T=ratio_T,
        at_one_T=inputs.gated(-2 * advantage_T / tau_T),
        clipped_T=none_T,
        capped_T=none_T,
        drift_T=-bounded(inputs.log_ratio_T, rule),
    )


def sapo(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-A * 4 / tau * sigmoid(tau (r - 1))``, tau being `tau_pos` or, unless A > 0, `tau_neg` in `numbers`.

    At ratio one its derivative is minus the advantage and its value ``-2 A / tau``. Source: TRL
    ``GRPOTrainer._compute_loss``, which clamps no log-ratio and logs no clip metrics.
    """
    advantage_T = inputs.advantage_T
    ratio_T = log_weights(inputs, rule).exp()
    pair = torch.tensor([rule.numbers["tau_pos"], rule.numbers["tau_neg"]], dtype=ratio_T.dtype, device=ratio_T.device)
    tau_T = torch.where(advantage_T > 0, pair[0], pair[1])
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1))
    return PolicyTerm(
        value_T=inputs.gated(-(gate_T * 4 / tau_T) * advantage_T),
        slope_T=gathered(inputs, rule, inputs.gated(-advantage_T * 4 * ratio_T * gate_T * (1 - gate_T))),
        ratio_T=ratio_T,
        at_one_T=inputs.gated(-2 * advantage_T / tau_T),
    )

"""vespo: the log-prob times a detached weight of the row."""

import torch

from rolloutdoctor.formulas.losses.gates import SMALLEST
from rolloutdoctor.formulas.losses.terms import PolicyTerm, TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def vespo(inputs: TokenInputs, rule: Surrogate) -> PolicyTerm:
    """``-phi * A * log-prob``, phi a detached weight of the row: ``exp(lambda - lambda w) w^k``.

    w is the product of the row's ratios, of policy to old and, where the sampler is corrected for, of old to sampler
    (`TokenInputs.log_weight_N`); k and lambda go with the sign of the advantage. It is the same at either level of
    importance sampling. Source: TRL ``GRPOTrainer.get_gamma_weights``.
    """
    advantage_T = inputs.advantage_T
    log_N = inputs.row_sum(inputs.log_ratio_T.clamp(-20.0, 20.0))
    if inputs.log_weight_N is not None:
        log_N = log_N + inputs.log_weight_N
    log_T = inputs.expand(log_N).clamp(SMALLEST, 20.0)
    positive_T = advantage_T >= 0
    k, decay = (
        torch.tensor([rule.numbers[f"{name}_pos"], rule.numbers[f"{name}_neg"]], dtype=log_T.dtype, device=log_T.device)
        for name in ("k", "lambda")
    )
    power_T = torch.where(positive_T, k[0], k[1])
    decay_T = torch.where(positive_T, decay[0], decay[1]).clamp(min=1e-4)
    phi_T = torch.exp(decay_T + power_T * log_T - decay_T * log_T.exp()).nan_to_num(0.0, 0.0, 0.0)
    value_T = -phi_T * advantage_T * inputs.policy_T
    return PolicyTerm(
        value_T=inputs.gated(value_T),
        slope_T=inputs.gated(-phi_T * advantage_T),
        ratio_T=phi_T,
        at_one_T=inputs.gated(-advantage_T * inputs.policy_T),
        logged_T=phi_T,
    )

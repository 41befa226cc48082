"""The importance ratio and its derivative, shared by the policy terms."""

import torch
from torch import Tensor

from rolloutdoctor.objective import Surrogate


def bounded(log_ratio_T: Tensor, rule: Surrogate) -> Tensor:
    """The log-ratio, ``[T]``, clamped where the rule says so."""
    bound = rule.log_ratio_bound
    return log_ratio_T if bound is None else log_ratio_T.clamp(-bound, bound)


def importance_ratio(log_ratio_T: Tensor, rule: Surrogate) -> tuple[Tensor, Tensor]:
    """Importance ratio and its derivative, both ``[T]``; the derivative is 0 where the log-ratio is clamped."""
    ratio_T = bounded(log_ratio_T, rule).exp()
    if rule.log_ratio_bound is None:
        return ratio_T, ratio_T
    return ratio_T, torch.where(log_ratio_T.abs() <= rule.log_ratio_bound, ratio_T, 0.0)

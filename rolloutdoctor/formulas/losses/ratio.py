"""The importance ratio and its derivative, shared by the policy terms."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.levels import log_weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def bounded(log_ratio_T: Tensor, rule: Surrogate) -> Tensor:
    """The log-ratio, ``[T]``, clamped where the rule says so."""
    if rule.finite:
        log_ratio_T = torch.where(log_ratio_T.isfinite(), log_ratio_T, 0.0)
    bound = rule.log_ratio_bound
    return log_ratio_T if bound is None else log_ratio_T.clamp(-bound, bound)


def importance_ratio(log_ratio_T: Tensor, rule: Surrogate) -> tuple[Tensor, Tensor]:
    """Importance ratio and its derivative, both ``[T]``; the derivative is 0 where the log-ratio is clamped."""
    ratio_T = bounded(log_ratio_T, rule).exp()
    if rule.log_ratio_bound is None and not rule.finite:
        return ratio_T, ratio_T
    bound = torch.finfo(ratio_T.dtype).max if rule.log_ratio_bound is None else rule.log_ratio_bound
    return ratio_T, torch.where(log_ratio_T.abs() <= bound, ratio_T, 0.0)


def weights(inputs: TokenInputs, rule: Surrogate) -> tuple[Tensor, Tensor, Tensor]:
    """Log of the ratio that the term weighs with, the ratio, and its derivative, ``[T]`` each: made once for all."""

    def make() -> tuple[Tensor, ...]:
        log_T = log_weights(inputs, rule)
        ratio_T, slope_T = importance_ratio(log_T, rule)
        return (ratio_T, *([] if slope_T is ratio_T else [slope_T]), *([] if of_token else [log_T]))

    of_token = rule.level == "token"
    # The key says nothing of which tokens are kept.
    cached = inputs.cached if inputs.kept_T is None else lambda _, compute: compute()
    ratio_T, *rest = cached(("weights", rule.old, rule.level, rule.log_ratio_bound, rule.finite), make)
    log_T = inputs.log_ratio_T if of_token else rest.pop()
    return log_T, ratio_T, rest.pop() if rest else ratio_T


def unmoved(x_T: Tensor, clamped_T: Tensor) -> Tensor:
    """1 where a clamp left a value as it was, else 0, in its dtype: what autograd lets through the clamp.

    Arithmetic, because torch's comparisons and selections on the CPU cost several times as much.
    """
    return 1 - (x_T - clamped_T).abs_().sign_()


def share_of_first(first_T: Tensor, second_T: Tensor) -> Tensor:
    """The share of the derivative of a maximum that autograd gives to the first: 1, 0, or 0.5 where both are equal."""
    return (first_T - second_T).sign_().mul_(0.5).add_(0.5)

"""slime's estimators over all response tokens, masked ones included, and its whitening."""

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.scan import reverse_scan
from rolloutdoctor.results.errors import CannotComputeError


def discounted_returns(
    kl_T: Tensor | None, reward_N: Tensor, mask_T: Tensor, offsets: Tensor, coef: float, gamma: float
) -> Tensor:
    """REINFORCE++: ``G_t = r_t + gamma G_{t+1}`` with ``r_t = -coef kl_t m_t``, ``[T]`` float64.

    The reward goes to the last trained token. The discount counts masked tokens too, unlike verl's. Source: slime
    ``get_reinforce_plus_plus_returns``.

    Raises:
        CannotComputeError: if a row has no trained token, where slime's assertion fails.
    """
    dead_N = seg.total(mask_T, offsets) == 0
    if bool(dead_N.any()):
        raise CannotComputeError(
            f"reinforce_plus_plus needs a trained token in every row, and {int(dead_N.sum())} rows have none; "
            f"slime fails here (its assertion that a sequence is not fully masked)"
        )
    rewards_T = torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    if kl_T is not None:
        rewards_T = torch.where(mask_T, -coef * kl_T.double(), rewards_T)
    place_T = torch.where(mask_T, torch.arange(len(mask_T), device=mask_T.device), -1)
    rewards_T.index_add_(0, seg.high(place_T.double(), offsets).long(), reward_N)
    return reverse_scan(rewards_T, gamma, offsets)


def whiten(x: Tensor, tokens: Tensor) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)`` over the trained tokens, given to masked ones too, float64 in the shape of `x`.

    The variance is unbiased from two tokens on, and 0 for one. slime takes it as a difference of float32 sums, so
    where the mean is large against the spread its own result is rounding: relative to the variance the error is
    about ``1e-7 mean^2 / variance``. Here it is the exact one. Source: slime ``distributed_masked_whiten``.

    Args:
        x: one value for each token, or for each row.
        tokens: how many trained tokens have each value.

    Raises:
        CannotComputeError: if no token of the step is trained, where slime fails.
    """
    weight = tokens.double()
    count = weight.sum()
    if float(count) == 0:
        raise CannotComputeError("normalize_advantages needs a trained token in a step; slime fails here")
    value = torch.where(weight > 0, x.double(), 0.0)
    mean = (weight * value).sum() / count
    variance = (weight * (value - mean).square()).sum() / (count - 1).clamp(min=1)
    return (x.double() - mean) * torch.rsqrt(variance + 1e-8)

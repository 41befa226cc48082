"""Whitening over the trained tokens of a step."""

import torch
from torch import Tensor

from rolloutdoctor.results.errors import TRAINER, CannotComputeError


def whiten(x: Tensor, tokens: Tensor | None = None) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)``, m and v the mean and the unbiased variance over tokens, float64.

    Args:
        x: one value for each trained token, or for each row.
        tokens: how many trained tokens have each value; None: one. Values that no token has come out as 0.

    Source: verl ``masked_whiten``, whose masked means divide by the number of tokens plus 1e-8.

    Raises:
        CannotComputeError: for fewer than two tokens, where verl fails.

    >>> [round(float(y), 4) for y in whiten(torch.tensor([1.0, 3.0]))]
    [-0.7071, 0.7071]
    """
    weight = torch.ones_like(x, dtype=torch.float64) if tokens is None else tokens.double()
    count = weight.sum()
    if float(count) < 2:
        raise CannotComputeError(
            f"whitening needs at least two trained tokens in a step, and this one has {int(count)}; {TRAINER} fails "
            "here"
        )
    value = torch.where(weight > 0, x.double(), 0.0)
    mean = (weight * value).sum() / (count + 1e-8)
    variance = (weight * (value - mean) ** 2).sum() / (count + 1e-8) * count / (count - 1)
    return torch.where(weight > 0, (value - mean) * torch.rsqrt(variance + 1e-8), 0.0)


def whiten_every_token(x: Tensor, tokens: Tensor) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)`` with m and v over the trained tokens, given to masked ones too, float64.

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
        raise CannotComputeError(f"normalize_advantages needs a trained token in a step; {TRAINER} fails here")
    value = torch.where(weight > 0, x.double(), 0.0)
    mean = (weight * value).sum() / count
    variance = (weight * (value - mean).square()).sum() / (count - 1).clamp(min=1)
    return (x.double() - mean) * torch.rsqrt(variance + 1e-8)

"""Whitening over the trained tokens of a step, and over other tokens than those."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import TRAINER, CannotComputeError

Moments = Literal["both", "mean", "variance", "mean-own-centre", "variance-own-centre"]


@dataclass(frozen=True, eq=False)
class Population:
    """Population of mean and variance, where that is not the trained tokens of the step.

    Attributes:
        masked: how many masked tokens count with each value, ``[n]``; None: none.
        zeros: how many positions count as 0.
        moments: which of the two are taken over these as well; the other is over the trained tokens. The variance is
            about the mean that is subtracted, or, with an own centre, about that of its own tokens.
        part: ``[n]`` int64, the part of the step whose moments each value gets; None: the whole step.
        alone: a single token in a part has a variance of 0; False: it is refused.
    """

    masked: Tensor | None = None
    zeros: float = 0.0
    moments: Moments = "both"
    part: Tensor | None = None
    alone: bool = False


def context_slices(position_T: Tensor, total_T: Tensor, ranks: int) -> Tensor:
    """The rank of context parallelism that has each token, ``[T]`` int64.

    A row of L tokens is cut into ``2 ranks`` chunks of ``ceil(L / (2 ranks))``; rank r has the r-th from the start and
    the r-th from the end, and of a token what predicts it: the position before it. Source: slime
    ``get_logits_and_tokens_offset_with_cp``.

    Args:
        position_T: ``[T]`` int64, position in prompt and response, from 0.
        total_T: ``[T]`` int64, tokens of prompt and response.
        ranks: how many there are.

    >>> context_slices(torch.arange(1, 9), torch.full((8,), 9), 2).tolist()
    [0, 0, 0, 1, 1, 1, 1, 1]
    """
    chunk_T = (total_T + 2 * ranks - 1) // (2 * ranks)
    number_T = (position_T - 1).clamp(min=0) // chunk_T.clamp(min=1)
    return torch.minimum(number_T, 2 * ranks - 1 - number_T)


def whiten(x: Tensor, tokens: Tensor | None = None, population: Population | None = None) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)``, m and v the mean and the unbiased variance over tokens, float64.

    Args:
        x: one value for each trained token, or for each row.
        tokens: how many trained tokens have each value; None: one. Values that no token has come out as 0.
        population: what m and v are taken over instead of the trained tokens.

    Source: verl ``masked_whiten``, whose masked means divide by the number of tokens plus 1e-8.

    Raises:
        CannotComputeError: for fewer than two tokens, where verl fails.

    >>> [round(float(y), 4) for y in whiten(torch.tensor([1.0, 3.0]))]
    [-0.7071, 0.7071]
    """
    weight = torch.ones_like(x, dtype=torch.float64) if tokens is None else tokens.double()
    if population is not None:
        return torch.where(weight > 0, _whiten_over(x.double(), weight, population), 0.0)
    count = weight.sum()
    if float(count) < 2:
        raise CannotComputeError(
            f"whitening needs at least two trained tokens in a step, and this one has {int(count)}; {TRAINER} fails "
            "here"
        )
    value = torch.where(weight > 0, x.double(), 0.0)
    mean, factor = _moments(value, weight)
    return torch.where(weight > 0, (value - mean) * factor, 0.0)


def _moments(value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean, and one over the root of the variance, of two values or more; float64."""
    count = weight.sum()
    mean = (weight * value).sum() / (count + 1e-8)
    variance = (weight * (value - mean) ** 2).sum() / (count + 1e-8) * count / (count - 1)
    return mean, torch.rsqrt(variance + 1e-8)


def whitened_zero(x: Tensor) -> float:
    """Return what `whiten` makes of a 0 that is none of the values, such as padding.

    >>> round(whitened_zero(torch.tensor([1.0, 3.0])), 4)
    -1.4142
    """
    mean, factor = _moments(x.double(), torch.ones_like(x, dtype=torch.float64))
    return float(-mean * factor)


def whiten_every_token(
    x: Tensor,
    tokens: Tensor,
    population: Population | None = None,
    *,
    floor: bool = False,
    epsilon: float | None = None,
    centres_only: bool = False,
) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)`` with m and v over the trained tokens, given to masked ones too, float64.

    The variance is unbiased from two tokens on, and 0 for one. slime takes it as a difference of float32 sums, so
    where the mean is large against the spread its own result is rounding: relative to the variance the error is
    about ``1e-7 mean^2 / variance``. Here it is the exact one. Source: slime ``distributed_masked_whiten``.

    Args:
        x: one value for each token, or for each row.
        tokens: how many trained tokens have each value.
        population: what m and v are taken over instead of the trained tokens.
        floor: the divisor is ``sqrt(max(v, 1e-8))``, and v divides by the number of tokens. Source: NeMo-RL
            ``ReinforcePlusPlusAdvantageEstimator``.
        epsilon: the divisor is ``sqrt(v) + epsilon``, 1 for a single token. Source: AReaL ``Normalization``.
            ``ReinforcePlusPlusAdvantageEstimator``; OpenRLHF ``compute_advantages_and_returns``.
        centres_only: the mean is subtracted, and nothing divides. Source: OpenRLHF's ``no_std_norm``.

    Raises:
        CannotComputeError: if no token of the step is trained, where slime fails.
    """
    weight = tokens.double()
    if population is not None:
        return _whiten_over(x.double(), weight, population)
    count = weight.sum()
    if float(count) == 0:
        raise CannotComputeError(f"normalize_advantages needs a trained token in a step; {TRAINER} fails here")
    value = torch.where(weight > 0, x.double(), 0.0)
    mean = (weight * value).sum() / count
    if centres_only:
        return x.double() - mean
    squares = (weight * (value - mean).square()).sum()
    if epsilon is not None:
        deviation = (squares / (count - 1)).sqrt() if float(count) > 1 else torch.ones_like(squares)
        return torch.where(weight > 0, (x.double() - mean) / (deviation + epsilon), 0.0)
    if floor:
        return (x.double() - mean) * torch.rsqrt((squares / count).clamp(min=1e-8))
    return (x.double() - mean) * torch.rsqrt(squares / (count - 1).clamp(min=1) + 1e-8)


def _whiten_over(x: Tensor, weight: Tensor, population: Population) -> Tensor:
    """``(x - m) / sqrt(v + 1e-8)``, m and the unbiased v over a population, float64 ``[n]``."""
    if not len(x):
        return x
    everything = weight if population.masked is None else weight + population.masked.double()
    over_all, over_trained = (everything, population.zeros), (weight, 0.0)
    of_mean = over_trained if population.moments.startswith("variance") else over_all
    variance_weight, variance_zeros = over_trained if population.moments.startswith("mean") else over_all
    part = torch.zeros(len(x), dtype=torch.int64, device=x.device) if population.part is None else population.part
    value = torch.where(everything > 0, x, 0.0)

    def mean_over(weight: Tensor, zeros: float) -> Tensor:
        return seg.total_by(part, weight * value) / (seg.total_by(part, weight) + zeros)

    mean_P = centre_P = mean_over(*of_mean)
    if population.moments.endswith("own-centre"):
        centre_P = mean_over(variance_weight, variance_zeros)
    squares_P = seg.total_by(part, variance_weight * (value - centre_P[part]).square())
    squares_P = squares_P + variance_zeros * centre_P.square()
    count_P = seg.total_by(part, variance_weight) + variance_zeros
    if population.alone and bool((count_P[part] == 0).any()):
        raise CannotComputeError(f"whitening needs a trained token in every slice of a step; {TRAINER} fails here")
    if not population.alone and bool((count_P[part] < 2).any()):
        raise CannotComputeError("whitening needs at least two tokens in every part of a step")
    return (x - mean_P[part]) * torch.rsqrt(squares_P / (count_P - 1).clamp(min=1) + 1e-8)[part]

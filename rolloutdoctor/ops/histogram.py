"""Exact counts of values whose range nobody knows beforehand."""

import math

import torch
from torch import Tensor

from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.results.histograms import FINE_BINS, Histogram

_EXACT = 2**50
"""Multiples of the width stay below this, where float64 still tells one from the next."""


def histogram(x: Tensor) -> Histogram:
    """Count values of any shape; NaN and infinity are counted apart.

    >>> found = histogram(torch.tensor([0.0, 0.0, 1.0, float("nan")]))
    >>> found.total, found.nonfinite, found.counts[0], found.counts[-1]
    (3, 1, 2, 1)
    """
    values = x.detach().double().reshape(-1)
    finite = el.finite(values)
    nonfinite = len(values) - len(finite)
    if not len(finite):
        return Histogram(nonfinite=nonfinite)
    low, high = el.extremes(finite)
    power = _power(low, high)
    width = 3.0**power
    first = math.floor(low / width + 0.5)
    index = (finite / width).add_(0.5).floor_().long().sub_(first)
    counts = torch.bincount(index.clamp_(min=0))
    return Histogram(power, first, tuple(counts.tolist()), nonfinite)


def _power(low: float, high: float) -> int:
    """The finest width that holds the range in `FINE_BINS` bins with a margin for rounding."""
    # Halved first: the difference of two large numbers of opposite sign must not overflow.
    span = (high / 2 - low / 2) / (FINE_BINS / 2 - 1)
    power = max(-40, math.ceil(math.log(max(max(abs(low), abs(high)) / _EXACT, span, 1e-300), 3)))
    while math.floor(high / 3.0**power + 0.5) - math.floor(low / 3.0**power + 0.5) + 1 > FINE_BINS:
        power += 1
    return power

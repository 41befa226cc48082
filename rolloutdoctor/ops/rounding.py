"""Rounding radii: how far a number of the trainer's own arithmetic may lie from the exact one.

A logged number and a recomputed one agree if they differ by no more than the radius of the number. A fixed relative
tolerance would not do: where terms cancel, what is lost depends on the terms and not on what is left of them. `exp` and
`log` differ by an ulp between processors and libraries, and sums are taken in another order on another device, so a log
is never reproduced to the bit.

Every function returns a `Radius` of two bounds. `largest` holds for any order of summation and any `exp` within two
ulps. `likely` takes the roundings of one long sum for independent with mean zero, and fails for fewer than one sum in
ten million; comparisons use it. Roundings of the terms themselves are never taken for independent: log-probs repeat,
and then so do their roundings.

The unit roundoff ``u`` of a format with ``p`` significant bits is ``2^-p``: half of the spacing at one.
"""

import math

import torch
from torch import Tensor

from rolloutdoctor.ops.unit_roundoff import SINGLE

EXP_ULPS = 2
"""Largest error of `exp`: torch's vectorised one is within 1 ulp, CUDA's `expf` within 2."""

DEVIATIONS = 6.0
"""The sum of n independent roundings of mean zero exceeds this times sqrt(n) with probability below 4e-8."""

Value = Tensor | float


class Radius:
    """Two bounds on a rounding error, both float64 of the shape of the value.

    Bounds of a single number are Python's numbers: with tensors of one number, sums and products take several times as
    long.
    """

    __slots__ = ("_largest", "_likely")

    def __init__(self, largest: Value, likely: Value) -> None:
        self._largest, self._likely = largest, likely

    @classmethod
    def of(cls, bound: Value) -> "Radius":
        """Return one bound for both, the likely and the certain one."""
        bound = bound.double() if isinstance(bound, Tensor) else float(bound)
        return cls(bound, bound)

    @property
    def largest(self) -> Tensor:
        """No order of summation loses more."""
        return torch.as_tensor(self._largest, dtype=torch.float64)

    @property
    def likely(self) -> Tensor:
        """No more than one sum in ten million loses more."""
        return torch.as_tensor(self._likely, dtype=torch.float64)

    def __add__(self, other: "Radius") -> "Radius":
        return Radius(self._largest + other._largest, self._likely + other._likely)

    def __mul__(self, factor: Value) -> "Radius":
        return Radius(self._largest * factor, self._likely * factor)

    def sum(self) -> "Radius":
        """Radius of the exact sum of all values."""
        return Radius(self.largest.sum(), self.likely.sum())

    def __float__(self) -> float:
        return float(self._likely)


def stored(value: Value, unit: float = SINGLE) -> Radius:
    """Radius of a value that was rounded once, to be stored or logged: ``u |x|``.

    >>> float(stored(1.0)) == 2**-24
    True
    """
    if not isinstance(value, Tensor):
        return Radius.of(unit * abs(value))
    return Radius.of(unit * value.double().abs())


def total(magnitude: Value, count: Value, unit: float = SINGLE) -> Radius:
    """Radius of a sum of `count` terms.

    A sum of n terms takes n - 1 additions. Each rounds a partial sum, which is never above ``sum |x|``, by ``u`` of it
    at most: together ``n u sum |x|``. Independent and of mean zero, they stay below ``6 sqrt(n) u sum |x|``.

    Source: Higham 2002, section 4.2; Higham and Mary 2019, theorem 2.4, with lambda = 6.

    Args:
        magnitude: sum of the absolute terms.
        count: how many there are.
        unit: of the format of the sum.

    >>> bound = total(10.0, 100)
    >>> float(bound.largest) / 2**-24, float(bound.likely) / 2**-24
    (1000.0, 600.0)
    """
    if not isinstance(magnitude, Tensor) and not isinstance(count, Tensor):
        return Radius(unit * magnitude * count, unit * magnitude * _independent(count))
    size = unit * torch.as_tensor(magnitude, dtype=torch.float64)
    number = torch.as_tensor(count, dtype=torch.float64)
    return Radius(size * number, size * _independent(number))


def _independent(count: Value) -> Value:
    """Bound the sum of `count` independent roundings of mean zero, in roundings of one direction."""
    if isinstance(count, Tensor):
        return torch.minimum(count, DEVIATIONS * count.sqrt())
    return min(count, DEVIATIONS * math.sqrt(count))


def mean(magnitude: Value, count: Value, unit: float = SINGLE) -> Radius:
    """Radius of a mean of `count` terms: that of their sum over the count, and the rounding of the division.

    Args:
        magnitude: mean of the absolute terms.
        count: how many there are.
        unit: of the format of the mean.
    """
    return total(magnitude, count, unit) + stored(magnitude, unit)


def ratio(total_ratio: Value, count: Value = 1.0, unit: float = SINGLE) -> Radius:
    """Radius of a sum of importance ratios ``exp(d)``, each with its own roundings; not that of their addition.

    `d` is the difference of two stored log-probs, off by ``u |d|``, which moves ``r = exp(d)`` by ``u r |d|``; `exp`
    itself adds `EXP_ULPS` ulps, ``2 EXP_ULPS u r``, and the product that a ratio enters one more rounding. With ``r |d|
    = r ln r`` above one and at most ``1 / e`` below it, a sum R of n of them loses at most ``u (R ln max(R, 1) + n / e
    + (2 EXP_ULPS + 1) R)``.

    Args:
        total_ratio: sum of the ratios.
        count: how many there are.
        unit: of the format of the log-probs.
    """
    value = torch.as_tensor(total_ratio, dtype=torch.float64)
    return Radius.of(unit * (value * (value.clamp(min=1).log() + 2 * EXP_ULPS + 1) + count / torch.e))


def k3(value: Value, count: Value = 1.0, unit: float = SINGLE) -> Radius:
    """Radius of a sum of k3 terms, each with its own roundings; not that of their addition.

    A k3 is ``exp(x) - 1 - x``, x the difference of two stored log-probs: off by ``u |x|``, which moves the k3 by ``u
    |x| |exp(x) - 1|``; `exp` is off by ``2 EXP_ULPS u exp(x)``; the two subtractions round at most ``exp(x) + 1 + |x|``
    and the k3. So a token loses ``u (5 exp(x) + 1 + |x| + |x| |exp(x) - 1| + k3)``: about ``6 u``, however small the k3
    is.

    Over tokens this follows from the sum K of their k3 alone, since ``|x| <= k + sqrt(2 k)`` and ``exp(x) <= 1 + k +
    |x|``: with ``X = K + sqrt(2 K n) >= sum |x|`` it is at most ``u (6 n + 7 X + K (8 + ln(2 K + 2)))``.

    Args:
        value: sum of the k3 terms.
        count: how many tokens it is over.
        unit: of the format of the log-probs.

    >>> float(k3(0.0)) / 2**-24
    6.0
    """
    if not isinstance(value, Tensor) and not isinstance(count, Tensor) and math.isfinite(value):
        magnitude, gap = abs(value), abs(value) + math.sqrt(2 * abs(value) * count)
        return Radius.of(unit * (6 * count + 7 * gap + magnitude * (8 + math.log(2 * magnitude + 2))))
    size = torch.as_tensor(value, dtype=torch.float64).abs()
    number = torch.as_tensor(count, dtype=torch.float64)
    distance = size + (2 * size * number).sqrt()
    return Radius.of(unit * (6 * number + 7 * distance + size * (8 + (2 * size + 2).log())))


def derivative(policy: Value, kl_weight: Value, growth: Value, unit: float = SINGLE) -> Radius:
    """Radius of the derivative ``a r + b (1 - exp(x))`` of one token, given the differences of its log-probs.

    The policy part loses `EXP_ULPS` ulps in `exp` and three roundings in products; the KL part the same ulps of
    ``exp(x)``, a subtraction and two products; their sum rounds once: ``u (8 |a r| + |b| (4 exp(x) + 4 |1 -
    exp(x)|))``. Two evaluations of the same log-probs, on two devices or by two orders of the same operations, differ
    by twice that.

    Args:
        policy: size of the policy part.
        kl_weight: b, the weight of the KL times its coefficient.
        growth: ``exp(x)``, x the reference's log-prob less the policy's; 0 without a KL term.
        unit: of the format of the values.
    """
    size, weight, grown = (torch.as_tensor(x, dtype=torch.float64).abs() for x in (policy, kl_weight, growth))
    return Radius.of(unit * (2 * (EXP_ULPS + 2) * size + weight * (2 * EXP_ULPS * grown + 4 * (1 - grown).abs())))


def kl(estimator: str, value: Value, count: Value = 1.0, unit: float = SINGLE) -> Radius:
    """Radius of a sum of KL terms of one sign, each with its own roundings; not that of their addition.

    Of the estimators, k3 cancels (`k3`). k1 and abs are one difference of stored values, k2 its half square: the
    difference is off by ``u |x|``, and each further operation adds one rounding, so that they lose 2 and 4 units.

    Args:
        estimator: name in `rolloutdoctor.formulas.kl.ESTIMATORS`.
        value: sum of the absolute terms.
        count: how many tokens it is over.
        unit: of the format of the log-probs.
    """
    if estimator.startswith("k3"):
        return k3(value, count, unit)
    return stored(value, unit) * (4 if estimator == "k2" else 2)


def scaled(
    size: Value, count: Value, scale: Value, value: Value, unit: float = SINGLE, *, error: Radius | None = None
) -> Radius:
    """Radius of ``(s - mean) / (std + eps)``, or of ``s - mean`` times any factor that does not depend on the scores.

    The score is stored, off by ``u |s|``; the mean is off by the radius of a mean; their difference rounds once more:
    with M the largest absolute score, ``e = u M (3 + n)`` at most. A standard deviation is 1-Lipschitz in the root mean
    square of the deviations, up to ``sqrt(n / (n - 1)) <= sqrt(2)``, and the sum of their squares loses half of its
    relative radius: ``f = 1 / (std + eps)`` is off by ``f (sqrt(2) e f + (n / 2 + 3) u)`` relative to itself. In all
    ``f e + |A| (sqrt(2) e f + (n / 2 + 5) u)``. Where all scores are equal f is 1 / eps: that is the float residue.

    Args:
        size: M, the largest absolute score among the rows that are compared.
        count: n, how many are compared.
        scale: f, what the centred score is multiplied by.
        value: A, the result.
        unit: of the format of the scores.
        error: how far the scores are off before they are stored; it adds twice to e, once for the mean.
    """
    size, number = (torch.as_tensor(x, dtype=torch.float64) for x in (size, count))
    factor, value = (torch.as_tensor(x, dtype=torch.float64).abs() for x in (scale, value))

    def bound(additions: Value, off: Value) -> Value:
        centred = 2 * off + unit * size * (3 + additions)
        return factor * centred + value * (2**0.5 * centred * factor + (additions / 2 + 5) * unit)

    likely = _independent(number)
    if error is None:
        return Radius(bound(number, 0.0), bound(likely, 0.0))
    return Radius(bound(number, error.largest), bound(likely, error.likely))


def std(value: Value, size: Value, count: Value, unit: float = SINGLE) -> Radius:
    """Radius of an unbiased standard deviation of `count` values.

    The centred values are off by ``e = u M (3 + n)`` (see `scaled`), which moves the deviation by ``sqrt(2) e`` at
    most; the sum of squares, the division and the root add ``(n / 2 + 3) u`` of it.

    Args:
        value: the standard deviation.
        size: M, the largest absolute value.
        count: n.
        unit: of the format of the values.
    """
    value, size, count = (x.double() if isinstance(x, Tensor) else x for x in (value, size, count))

    def bound(additions: Value) -> Value:
        return unit * (2**0.5 * size * (3 + additions) + value * (additions / 2 + 3))

    return Radius(bound(count), bound(_independent(count)))

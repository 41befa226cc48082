"""The one free number of a run: a coefficient of the KL, solved for and then demanded of every step."""

from collections.abc import Callable

import torch
from torch import Tensor

_START = 0.01
_ROUNDS = 4
_NEARER, _NEAR = 0.95, 1e-3
"""Share of what the round before left that a round may leave, unless it is this little of the logged values: where
rounds come no nearer, no coefficient gives the values."""

_ROUND_WITHIN = 2e-3
"""A coefficient this near to a number of two digits, relative to it, is that number: somebody typed it."""


def least_squares(residual: Tensor, slope: Tensor, radius: Tensor) -> float | None:
    """Return the coefficient c that makes ``residual - c slope`` least, in radii; None if no value depends on it.

    Args:
        residual: what is left of the logged values without the term, ``[n]``.
        slope: the term with a coefficient of 1, ``[n]``.
        radius: of the logged values, ``[n]``.
    """
    able = residual.isfinite() & slope.isfinite() & (radius > 0) & radius.isfinite()
    weight = 1 / radius[able].square()
    size = float((weight * slope[able].square()).sum())
    if not size > 0:
        return None
    return float((weight * slope[able] * residual[able]).sum()) / size


def bounds(residual: Tensor, slope: Tensor, radius: Tensor) -> tuple[float, float]:
    """Return the least and the greatest coefficient c with ``|residual - c slope| <= radius`` everywhere.

    Where no coefficient does, the least is above the greatest. Arguments are those of `least_squares`; one slope at
    least is not 0.
    """
    able = (slope != 0) & residual.isfinite() & slope.isfinite() & radius.isfinite()
    middle, width = residual[able] / slope[able], radius[able] / slope[able].abs()
    return float((middle - width).max()), float((middle + width).min())


def solve(values: Callable[[float], Tensor | None], logged: Tensor) -> float | None:
    """Return the coefficient whose values are nearest to the logged ones, by Gauss-Newton.

    Values that are affine in the coefficient (no standard deviation) take one round.

    Args:
        values: gives the values under a coefficient, ``[n]``.
        logged: the logged values, ``[n]``.
    """
    coef, left, near = _START, float("inf"), _NEAR * float(logged.norm())
    for _ in range(_ROUNDS):
        computed = values(coef)
        if computed is None or computed.shape != logged.shape:
            return None
        before, left = left, float((logged - computed).nan_to_num().norm())
        if left > max(near, _NEARER * before):
            return None
        ahead = values(coef * 1.5)
        assert ahead is not None  # like the values of the coefficient before it
        slope = (ahead - computed) / (coef * 0.5)
        step = least_squares(logged - computed, slope, torch.ones_like(logged))
        if step is None:
            return None
        following = coef + step
        if not 1e-9 < following < 1e6:
            return None
        if abs(following - coef) <= 1e-9 * coef:
            return rounded(following)
        coef = following
    return rounded(coef)


def rounded(coef: float) -> float:
    """Return the number of few digits that a coefficient is, within what a log can tell.

    >>> rounded(0.0010003), rounded(0.04712)
    (0.001, 0.04712)
    """
    for digits in (1, 2):
        short = float(f"{coef:.{digits}g}")
        if abs(short - coef) <= _ROUND_WITHIN * abs(coef):
            return short
    return float(f"{coef:.6g}")


def shortest(coef: float, low: float, high: float) -> float:
    """Return the number of fewest digits between two bounds, the one nearest to a coefficient between them.

    >>> shortest(0.00997938, 0.0099, 0.0101), shortest(0.04712, 0.04711, 0.04713)
    (0.01, 0.04712)
    """
    for digits in range(1, 7):
        short = float(f"{coef:.{digits}g}")
        if low <= short <= high:
            return short
    return rounded(coef)

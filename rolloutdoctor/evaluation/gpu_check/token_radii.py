"""How far values of a token may differ between two processors that both compute it right: pure functions.

Both take the same columns, and both do the same operations in the dtype of the tokens. Sums, differences and products
of two values are rounded in one way everywhere (IEEE 754). What differs is `exp` and its like, which every library
rounds in its own way, and the order in which a product of several values is multiplied out. A radius has two parts:

- what another `exp` makes of a value. An `exp` that is off by k ulps is the exact one of an argument off by ``2 k u``,
  `u` being the unit roundoff; two of them are as far apart as if the log-ratio had moved by twice that (`log_shift`);
- what rounding makes of it: `ROUNDINGS` units of each term that it is put together from, however small what is left of
  the terms. A k3, ``exp(-u) - 1 + u``, loses about ``u exp(-u)`` per operation, whatever its size (`kl_radii`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rolloutdoctor.formulas import kl
from rolloutdoctor.objective.objective import KlTerm

EXP_ULPS = 4
"""Largest error of `exp`, `expm1`, `log` and `sigmoid` in ulps: CUDA documents 2, numpy 2.52, SLEEF 1."""

EXP_UNITS = 2 * 2 * EXP_ULPS
"""Unit roundoffs between two such results: an ulp is two of them at most, and both may err, in opposite directions."""

ROUNDINGS = 16
"""Roundings of products and sums that a term goes through, eight on each side."""

Radii = tuple[Tensor, Tensor]
"""Radii of a value and of its derivative with respect to the policy's log-prob, ``[T]`` each."""


def unit_of(dtype: torch.dtype) -> float:
    """Unit roundoff: half of the spacing of the numbers at one.

    >>> unit_of(torch.float32) == 2.0**-24
    True
    """
    return torch.finfo(dtype).eps / 2


def log_shift(log_T: Tensor, unit: float) -> Tensor:
    """How far apart two arguments are that give what two processors' `exp` may give, ``[T]``.

    ``(|x| + EXP_UNITS) u``: the argument itself is rounded once. The `exp` of 0 is exactly 1 on every processor, so
    there is nothing between two of them.
    """
    shift_T = (log_T.abs() + EXP_UNITS) * unit
    return torch.where(log_T == 0, 0.0, shift_T).nan_to_num(0.0, 0.0, 0.0)


def difference(one_T: Tensor, other_T: Tensor) -> Tensor:
    """How far a value is from another, ``[T]`` float64: 0 where both are NaN or the same infinity."""
    return (one_T.double() - other_T.double()).abs_().nan_to_num(0.0, torch.inf)


def square_radius(x_T: Tensor, radius_T: Tensor) -> Tensor:
    """Radius of ``x^2``: ``(|x| + r)^2 - x^2``."""
    return radius_T * (2 * x_T.abs() + radius_T)


def product_radius(x_T: Tensor, x_radius_T: Tensor, y_T: Tensor, y_radius_T: Tensor) -> Tensor:
    """Radius of ``x y``: ``|x| s + |y| r + r s``."""
    return x_T.abs() * y_radius_T + y_T.abs() * x_radius_T + x_radius_T * y_radius_T


def k3_radii(u_T: Tensor, unit: float) -> Radii:
    """Radii of ``exp(-u) - 1 + u`` and of ``1 - exp(-u)``.

    >>> value, derivative = k3_radii(torch.zeros(1), 1.0)
    >>> float(value), float(derivative)
    (18.0, 20.0)
    """
    grown_T, size_T = u_T.neg().exp(), u_T.abs()
    value_T = (grown_T - 1 + u_T).abs()
    # The sum of both, what is left after the subtraction, and the same on the other side.
    of_value_T = EXP_UNITS * grown_T + 2 * ((grown_T + u_T).abs() + value_T + size_T)
    return of_value_T * unit, (EXP_UNITS * grown_T + 2 * (1 + grown_T)) * unit


def _estimate_radii(estimator: str, u_T: Tensor, unit: float) -> Radii:
    """Radii of an estimator and its derivative; where the derivative ends at a clamp, the whole of it."""
    value_T, slope_T = kl.ESTIMATORS[estimator](u_T)
    if not estimator.startswith("k3"):
        # One difference of two columns, squared and halved at most.
        return ROUNDINGS * unit * value_T.abs(), ROUNDINGS * unit * slope_T.abs()
    if estimator == "k3":
        return k3_radii(u_T, unit)
    near_T = u_T.clamp(-20, 20)
    of_value_T, of_slope_T = k3_radii(near_T, unit)
    free_T, turned_T = kl.k3(near_T)
    at_clamp_T = (free_T - kl.K3_UP_TO[estimator]).abs() <= of_value_T
    return of_value_T, of_slope_T + torch.where(at_clamp_T, turned_T.abs(), 0.0)


def kl_radii(
    term: KlTerm,
    u_T: Tensor,
    log_ratio_T: Tensor,
    unit: float,
    row_mean: Callable[[Tensor], Tensor],
) -> Radii:
    """Radii of a trainer's KL term and its derivative: `rolloutdoctor.formulas.kl.term` again, step by step.

    A value is cut at a clamp without a jump; its derivative jumps there, and counts whole where the value is within
    its radius of the clamp.

    Args:
        term: the estimator and what is made of it.
        u_T: ``[T]`` float64, the difference of the log-probs.
        log_ratio_T: ``[T]`` float64, the log of the importance ratio of the token.
        unit: unit roundoff of the dtype of the tokens.
        row_mean: gives every token the mean over its row.
    """
    value_T, slope_T = kl.ESTIMATORS[term.estimator](u_T)
    of_value_T, of_slope_T = _estimate_radii(term.estimator, u_T, unit)
    if term.straight_through:
        slope_T, of_slope_T = u_T, ROUNDINGS * unit * u_T.abs()
    if term.ratio_weighted:
        gather: Callable[[Tensor], Tensor] = (lambda x_T: x_T) if term.ratio_level == "token" else row_mean
        ratio_T = gather(log_ratio_T).exp()
        # The ratio is off, and the products with it are rounded.
        apart = gather(log_shift(log_ratio_T, unit)) + (ROUNDINGS + EXP_UNITS) * unit
        of_value_T, of_slope_T = (
            ratio_T * (radius_T + apart * x_T.abs()) for x_T, radius_T in ((value_T, of_value_T), (slope_T, of_slope_T))
        )
        value_T = ratio_T * value_T
        slope_T = ratio_T * slope_T + gather(value_T)
        of_slope_T = of_slope_T + gather(of_value_T) + ROUNDINGS * unit * slope_T.abs()
    if term.clamp is not None:
        at_clamp_T = (value_T.abs() - term.clamp).abs() <= of_value_T
        of_slope_T = of_slope_T + torch.where(at_clamp_T, slope_T.abs(), 0.0)
    return of_value_T, of_slope_T


def kl_as_shift(term: KlTerm, u_T: Tensor, unit: float) -> Tensor:
    """By how much the difference of log-probs must move for the KL to move by its radius, ``[T]``, away from 0.

    ``r / |slope|``; where the slope vanishes the value grows with the square, which gives ``sqrt(2 r exp(|u|))``.
    """
    radius_T, slope_T = _estimate_radii(term.estimator, u_T, unit)[0], kl.ESTIMATORS[term.estimator](u_T)[1]
    near_T = (2 * radius_T * u_T.abs().clamp(max=20).exp()).sqrt()
    shift_T = torch.minimum(near_T, radius_T / slope_T.abs())
    return torch.where(u_T < 0, -shift_T, shift_T).nan_to_num(0.0, 0.0, 0.0)

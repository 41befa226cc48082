"""Every KL estimator on one page: its value and its derivative.

All act on one token: ``u = policy - ref``, the difference of the log-probs of the sampled token, in nats. The
derivative is with respect to the policy's log-prob. Schulman's names: http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Term = tuple[Tensor, Tensor]
"""A value and its derivative with respect to the policy's log-prob, both ``[T]``."""


def k1(u: Tensor) -> Term:
    """``u``, derivative 1: unbiased as a value, no force in expectation as a loss."""
    return u, torch.ones_like(u)


def k2(u: Tensor) -> Term:
    """``u^2 / 2``, derivative ``u``."""
    return u * u / 2, u


def k3(u: Tensor) -> Term:
    """``exp(-u) - 1 + u``, derivative ``1 - exp(-u)``; never negative in exact arithmetic."""
    grown = u.neg().exp_()
    return (grown + u).sub_(1), 1 - grown


def absolute(u: Tensor) -> Term:
    """``|u|``, derivative ``sign(u)``."""
    return u.abs(), u.sign()


def k3_clamped(u: Tensor) -> Term:
    """verl's ``low_var_kl``: `k3` of the log-ratio clamped to +-20, the value clamped to +-10.

    Outside either clamp the derivative is 0. Source: verl ``core_algos.kl_penalty_forward``.
    """
    inside = u.abs() <= 20
    value, derivative = k3(u.clamp(-20, 20))
    return value.clamp(-10, 10), torch.where(inside & (value <= 10), derivative, 0.0)


ESTIMATORS: dict[str, Callable[[Tensor], Term]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k3_clamped": k3_clamped,
}


def term(
    estimator: str,
    u: Tensor,
    ratio: Tensor | None = None,
    *,
    straight_through: bool = False,
    input_bound: float | None = None,
    clamp: float | None = None,
    finite: bool = False,
    detached: bool = False,
    gather: Callable[[Tensor], Tensor] | None = None,
    bounds_ratio: bool = True,
) -> Term:
    """Value and derivative per token of an estimator as a trainer uses it.

    Args:
        estimator: name in `ESTIMATORS`.
        u: ``[T]`` policy minus reference log-probs.
        ratio: ``[T]`` importance ratio to multiply with; the gradient flows through it, and its derivative with
            respect to the policy's log-prob is itself. None: not weighted.
        input_bound: bound on ``|u|`` before any estimator; beyond it the derivative is 0, a ratio's too (None: none).
        straight_through: keep the value but take the derivative of `k2` (verl's names that end in ``+``).
        detached: the log-probs compared with the reference are not the policy's, so that only a ratio has a derivative.
        gather: for a ratio that depends on other tokens too: turns the derivatives by the log-ratio into those by each
            token's log-prob. None: the ratio is the token's own.
        bounds_ratio: False: beyond `input_bound` only the estimator's derivative is 0, and not that of the ratio.
        finite: a value that is not finite counts as 0, and has no derivative.
        clamp: bound on the absolute value after weighting (slime's ``low_var_kl``: 10); beyond it the derivative is 0.

    >>> u = torch.tensor([0.5])
    >>> [round(float(x), 4) for x in term("k3", u, torch.ones(1))]  # derivative is ratio * u
    [0.1065, 0.5]
    """
    inside = None if input_bound is None else u.abs() <= input_bound
    if input_bound is not None:
        u = u.clamp(-input_bound, input_bound)
    value, derivative = ESTIMATORS[estimator](u)
    if straight_through:
        derivative = u
    if detached:
        derivative = torch.zeros_like(u)
    if inside is not None and not bounds_ratio:
        derivative, inside = torch.where(inside, derivative, 0.0), None
    if ratio is not None:
        slope = (derivative + value).mul_(ratio) if gather is None else ratio * derivative + gather(ratio * value)
        value, derivative = ratio * value, slope
    if inside is not None:
        derivative = torch.where(inside, derivative, 0.0)
    if clamp is not None:
        derivative = torch.where(value.abs() <= clamp, derivative, 0.0)
        value = value.clamp(-clamp, clamp)
    if finite:
        live = value.isfinite()
        value, derivative = torch.where(live, value, 0.0), torch.where(live, derivative, 0.0)
    return value, derivative

"""Rejection of tokens and rows whose log-probs differ too much between sampler and trainer.

A statistic is named by what it is taken over (``token``, ``seq_sum``, ``seq_mean``, ``seq_max``) and by the
estimator of the divergence: with ``u`` the trainer's minus the sampler's log-prob within +-20, ``k1 = -u``,
``k2 = u^2 / 2``, ``k3 = exp(u) - 1 - u``. So k1 is the log of sampler over trainer: its bounds hold for the inverse
of the importance ratio.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rolloutdoctor.formulas.corrections.masked import LogRatios
from rolloutdoctor.objective.corrections import Rejection
from rolloutdoctor.ops import segments as seg

DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda u: -u,
    "k2": lambda u: 0.5 * u**2,
    "k3": lambda u: u.exp() - 1.0 - u,
}


def _row_max(ratios: LogRatios, x_T: Tensor) -> Tensor:
    """Largest value of each row's tokens, ``[N]``; 0 for a row without a token."""
    high_N = seg.high(torch.where(ratios.mask_T, x_T, -torch.inf), ratios.offsets)
    return torch.where(high_N == -torch.inf, 0.0, high_N)


REDUCTIONS: dict[str, Callable[[LogRatios, Tensor], Tensor]] = {
    "seq_sum": LogRatios.row_sum,
    "seq_mean": LogRatios.row_mean,
    "seq_max": _row_max,
}

STATISTICS = (
    *(f"token_{name}" for name in DIVERGENCES),
    *(f"{over}_{name}" for over in ("seq_sum", "seq_mean") for name in DIVERGENCES),
    "seq_max_k2",
    "seq_max_k3",
)
"""Statistics that verl rejects by; the largest k1 of a row is not among them."""


def statistic(ratios: LogRatios, name: str) -> tuple[Tensor, Tensor | None]:
    """A statistic per token ``[T]``, and per row ``[N]`` if it is one of rows."""
    over, _, divergence = name.rpartition("_")
    value_T = DIVERGENCES[divergence](ratios.safe_T)
    if over == "token":
        return value_T, None
    value_N = REDUCTIONS[over](ratios, value_T).to(value_T.dtype)
    return ratios.row_of(value_N), value_N


def _kept(value: Tensor, rule: Rejection) -> Tensor:
    is_kept = value <= rule.high
    return is_kept if rule.low is None else is_kept & (value >= rule.low)


def kept_tokens(ratios: LogRatios, rules: Sequence[Rejection]) -> Tensor:
    """The mask after rejection, ``[T]`` bool: tokens that every rule keeps.

    Source: verl ``compute_rollout_rejection_mask``.
    """
    mask_T = ratios.mask_T
    for rule in rules:
        mask_T = mask_T & _kept(statistic(ratios, rule.statistic)[0], rule)
    return mask_T


def rejection_metrics(ratios: LogRatios, rules: Sequence[Rejection]) -> dict[str, Tensor]:
    """verl's metrics of the rejection, ``[M]`` each, without the prefix ``rollout_corr/``.

    Source: verl ``compute_rollout_rejection_mask`` and ``compute_rs_metrics``.
    """
    metrics: dict[str, Tensor] = {}
    for rule in rules:
        metrics |= {f"rollout_rs_{rule.statistic}_{name}": x_M for name, x_M in _of_rule(ratios, rule).items()}
    lost_T = ratios.mask_T & ~kept_tokens(ratios, rules)
    metrics["rollout_rs_masked_fraction"] = ratios.mean(lost_T)
    metrics["rollout_rs_seq_masked_fraction"] = ratios.rows_mean(ratios.row_sum(lost_T) > 0)
    return metrics


def _of_rule(ratios: LogRatios, rule: Rejection) -> dict[str, Tensor]:
    value_T, value_N = statistic(ratios, rule.statistic)
    filled_N = ratios.filled_N
    row_N = ratios.row_mean(value_T) if value_N is None else value_N
    lost_T = ratios.mask_T & ~_kept(value_T, rule)
    row_high = ratios.rows_mean(row_N > rule.high, filled_N)
    row_low = torch.zeros_like(row_high) if rule.low is None else ratios.rows_mean(row_N < rule.low, filled_N)
    metrics = {
        "mean": ratios.mean(value_T),
        "max": ratios.rows_high(row_N, filled_N),
        "min": ratios.rows_low(row_N, filled_N),
        "fraction_high": row_high,
        "fraction_low": row_low,
        "std": ratios.spread(value_T, 0.0 if rule.low is None else rule.low, rule.high),
        "seq_mean": ratios.rows_mean(row_N, filled_N),
        "seq_std": ratios.rows_std(row_N, filled_N),
        "seq_max": ratios.rows_high(row_N, filled_N),
        "seq_min": ratios.rows_low(row_N, filled_N),
        "seq_max_deviation": ratios.rows_high(row_N.abs(), filled_N),
        "seq_fraction_high": row_high,
        "masked_fraction": ratios.mean(lost_T),
        "seq_masked_fraction": ratios.rows_mean(ratios.row_sum(lost_T) > 0, filled_N),
    }
    if rule.low is not None:
        metrics["seq_fraction_low"] = row_low
    if value_N is None:
        # These are over tokens where the statistic is one of tokens.
        metrics["max"], metrics["min"] = ratios.largest(value_T), ratios.smallest(value_T)
        metrics["fraction_high"] = ratios.mean(value_T > rule.high)
        if rule.low is not None:
            metrics["fraction_low"] = ratios.mean(value_T < rule.low)
    return metrics

"""Importance weights of the policy term, from how far the sampler's log-probs are from the trainer's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.formulas.corrections.masked import SAFETY_BOUND, LogRatios
from rolloutdoctor.objective.corrections import ImportanceWeights
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import TRAINER, CannotComputeError

SMALLEST_MEAN = 1e-8
"""Weights of a mean up to this are not divided by it."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Importance weights.

    Attributes:
        value_T: ``[T]`` what the policy term is multiplied by; 0 at masked tokens.
        bounded_T: ``[T]`` the same before the division by their mean.
        raw_T: ``[T]`` the same before the bounds.
        factor_M: ``[M]`` float64, what those of each part were divided by; 1 if nothing.
    """

    value_T: Tensor
    bounded_T: Tensor
    raw_T: Tensor
    factor_M: Tensor


def importance_weights(ratios: LogRatios, rule: ImportanceWeights, together_N: Tensor | None = None) -> Weights:
    """``w = exp(log-ratio)`` per token, or of the row's sum; cut at a bound, or 0 outside of two; maybe of mean one.

    Args:
        ratios: trainer's minus sampler's log-probs.
        rule: level and bounds.
        together_N: ``[N]`` int64, rows over which processes that run at the same time take the mean that weights are
            divided by; None: one process takes it over each part.

    Source: verl ``compute_rollout_correction_weights``.

    Raises:
        CannotComputeError: if every weight of a part is 0, where verl's metrics divide by zero.
    """
    log_T = ratios.value_T if rule.level == "token" else ratios.row_of(ratios.row_sum(ratios.value_T))
    raw_T = torch.where(ratios.mask_T, log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0.0)
    if rule.low is None:
        bounded_T = raw_T.clamp(max=rule.high)
    else:
        bounded_T = torch.where((raw_T >= rule.low) & (raw_T <= rule.high), raw_T, 0.0)
    # A bound that is not a number leaves nothing either, but then verl's metrics are not numbers and nothing fails.
    if not math.isnan(rule.high) and not bool((ratios.parts(ratios.row_sum(bounded_T != 0)) > 0).all()):
        unit = "the step" if ratios.part_N is None else "a micro-batch"
        raise CannotComputeError(f"every importance weight of {unit} is 0, and {TRAINER} fails here")
    if not rule.normalised:
        return Weights(bounded_T, bounded_T, raw_T, torch.ones_like(ratios.count_M))
    factor_N = _mean(ratios, rule, bounded_T, together_N)
    factor_N = torch.where(factor_N > SMALLEST_MEAN, factor_N, 1.0)
    return Weights(bounded_T / ratios.row_of(factor_N), bounded_T, raw_T, ratios.rows_high(factor_N))


def _mean(ratios: LogRatios, rule: ImportanceWeights, bounded_T: Tensor, together_N: Tensor | None) -> Tensor:
    """Mean of the weights of tokens, or of rows with a token, expanded to rows, ``[N]`` float64."""
    if rule.level == "token":
        sum_N, count_N = ratios.row_sum(bounded_T), ratios.count_N
    else:
        sum_N, count_N = ratios.row_mean(bounded_T), ratios.filled_N
    if together_N is not None:
        sums, counts = (seg.total_by(together_N, x_N) for x_N in (sum_N, count_N))
        return (sums / counts)[together_N]
    # One process alone uses a masked mean for tokens, which adds 1e-8 to the count.
    added = 1e-8 if rule.level == "token" else 0.0
    return ratios.to_rows(ratios.parts(sum_N) / (ratios.parts(count_N) + added))


def importance_metrics(ratios: LogRatios, rule: ImportanceWeights, weights: Weights) -> dict[str, Tensor]:
    """verl's metrics of the weights, before they are divided by their mean, ``[M]`` each.

    Without the prefix ``rollout_corr/``. Rows without a token count as 0 in the metrics of rows, and as ratio one in
    those of sequence weights.

    Source: verl ``compute_is_metrics``.
    """
    low = 1.0 / rule.high if rule.low is None else rule.low
    bounded_T, raw_T = weights.bounded_T, weights.raw_T
    metrics = {"rollout_is_mean": ratios.mean(bounded_T)}
    if rule.level == "sequence":
        log_N = ratios.row_sum(ratios.value_T)
        log_low, log_high = torch.tensor([low, rule.high], dtype=log_N.dtype, device=log_N.device).log()
        metrics["rollout_is_max"] = ratios.rows_high(log_N).clamp(max=SAFETY_BOUND).exp()
        metrics["rollout_is_min"] = ratios.rows_low(log_N).exp()
        metrics["rollout_is_ratio_fraction_high"] = ratios.rows_mean(log_N > log_high)
        metrics["rollout_is_ratio_fraction_low"] = ratios.rows_mean(log_N < log_low)
    else:
        metrics["rollout_is_max"] = ratios.largest(bounded_T)
        metrics["rollout_is_min"] = ratios.smallest(bounded_T)
        metrics["rollout_is_ratio_fraction_high"] = ratios.mean(raw_T > rule.high)
        metrics["rollout_is_ratio_fraction_low"] = ratios.mean(raw_T < low)
    metrics["rollout_is_std"] = ratios.spread(bounded_T, 0.0, rule.high)
    cut_T = bounded_T.double().clamp(0.0, rule.high)
    scale_T = seg.expand(ratios.to_rows(ratios.mean(cut_T) + 1e-8), ratios.offsets)
    metrics["rollout_is_eff_sample_size"] = 1.0 / ratios.mean((cut_T / scale_T).square())
    mean_N, raw_N = ratios.row_mean(bounded_T), ratios.row_mean(raw_T)
    metrics["rollout_is_seq_mean"] = ratios.rows_mean(mean_N)
    metrics["rollout_is_seq_std"] = ratios.rows_std(mean_N)
    metrics["rollout_is_seq_max"] = ratios.rows_high(mean_N)
    metrics["rollout_is_seq_min"] = ratios.rows_low(mean_N)
    metrics["rollout_is_seq_max_deviation"] = ratios.rows_high((mean_N - 1.0).abs())
    metrics["rollout_is_seq_fraction_high"] = ratios.rows_mean(raw_N > rule.high)
    metrics["rollout_is_seq_fraction_low"] = ratios.rows_mean(raw_N < low)
    if rule.low is not None:
        metrics["rollout_is_oob_ratio"] = ratios.mean((raw_T < rule.low) | (raw_T > rule.high))
    if rule.normalised:
        metrics["rollout_is_batch_norm_factor"] = weights.factor_M
    return metrics

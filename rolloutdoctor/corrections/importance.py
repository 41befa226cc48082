"""Importance weights of the policy term, from how far the sampler's log-probs are from the trainer's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.corrections.masked import SAFETY_BOUND, LogRatios, share, spread, std
from rolloutdoctor.errors import CannotComputeError
from rolloutdoctor.objective import ImportanceWeights


@dataclass(frozen=True, eq=False)
class Weights:
    """Importance weights.

    Attributes:
        value_T: ``[T]`` what the policy term is multiplied by; 0 at masked tokens.
        bounded_T: ``[T]`` the same before the division by their mean.
        raw_T: ``[T]`` the same before the bounds.
        factor: what they were divided by; 1 if nothing.
    """

    value_T: Tensor
    bounded_T: Tensor
    raw_T: Tensor
    factor: float


def importance_weights(ratios: LogRatios, rule: ImportanceWeights) -> Weights:
    """``w = exp(log-ratio)`` per token, or of the row's sum; cut at a bound, or 0 outside of two; maybe of mean one.

    Source: verl ``compute_rollout_correction_weights``.

    Raises:
        CannotComputeError: if every weight is 0, where verl's metrics divide by zero.
    """
    log_T = ratios.value_T if rule.level == "token" else ratios.row_of(ratios.row_sum(ratios.value_T))
    raw_T = torch.where(ratios.mask_T, log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0.0)
    if rule.low is None:
        bounded_T = raw_T.clamp(max=rule.high)
    else:
        bounded_T = torch.where((raw_T >= rule.low) & (raw_T <= rule.high), raw_T, 0.0)
    if not bool((bounded_T != 0).any()):
        raise CannotComputeError("every importance weight of the step is 0, and verl fails here")
    factor = 1.0
    if rule.normalised:
        if rule.level == "token":
            mean = ratios.mean(bounded_T)
        else:
            mean = float(ratios.row_mean(bounded_T)[ratios.count_N > 0].mean())
        factor = mean if mean > 1e-8 else 1.0
    return Weights(bounded_T / factor, bounded_T, raw_T, factor)


def importance_metrics(ratios: LogRatios, rule: ImportanceWeights, weights: Weights) -> dict[str, float]:
    """verl's metrics of the weights, before they are divided by their mean, without the prefix ``rollout_corr/``.

    Rows without a token count as 0 in the metrics of rows, and as ratio one in those of sequence weights.

    Source: verl ``compute_is_metrics``.
    """
    low = 1.0 / rule.high if rule.low is None else rule.low
    applied, raw = weights.bounded_T[ratios.mask_T], weights.raw_T[ratios.mask_T]
    found = {"rollout_is_mean": ratios.mean(weights.bounded_T)}
    if rule.level == "sequence":
        log_N = ratios.row_sum(ratios.value_T)
        found["rollout_is_max"] = float(log_N.max().clamp(max=SAFETY_BOUND).exp())
        found["rollout_is_min"] = float(log_N.min().exp())
        found["rollout_is_ratio_fraction_high"] = share(log_N > math.log(rule.high))
        found["rollout_is_ratio_fraction_low"] = share(log_N < math.log(low))
    else:
        found["rollout_is_max"] = float(applied.max())
        found["rollout_is_min"] = float(applied.min())
        found["rollout_is_ratio_fraction_high"] = ratios.mean(weights.raw_T > rule.high)
        found["rollout_is_ratio_fraction_low"] = ratios.mean(weights.raw_T < low)
    found["rollout_is_std"] = spread(applied, 0.0, rule.high)
    cut_T = weights.bounded_T.double().clamp(0.0, rule.high)
    found["rollout_is_eff_sample_size"] = 1.0 / ratios.mean((cut_T / (ratios.mean(cut_T) + 1e-8)).square())
    mean_N, raw_N = ratios.row_mean(weights.bounded_T), ratios.row_mean(weights.raw_T)
    found["rollout_is_seq_mean"] = float(mean_N.mean())
    found["rollout_is_seq_std"] = std(mean_N)
    found["rollout_is_seq_max"] = float(mean_N.max())
    found["rollout_is_seq_min"] = float(mean_N.min())
    found["rollout_is_seq_max_deviation"] = float((mean_N - 1.0).abs().max())
    found["rollout_is_seq_fraction_high"] = share(raw_N > rule.high)
    found["rollout_is_seq_fraction_low"] = share(raw_N < low)
    if rule.low is not None:
        found["rollout_is_oob_ratio"] = share((raw < rule.low) | (raw > rule.high))
    if rule.normalised:
        found["rollout_is_batch_norm_factor"] = weights.factor
    return found

"""Weights and rejections that a loss makes by itself of trainer and sampler differing.

Source: slime ``examples/train_infer_mismatch_helper/mis.py``: ``compute_mis_weights``. Unlike `corrections.rejection`,
what it takes out loses its KL term too, and no denominator changes; bounds hold for trainer over sampler.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.formulas.corrections.masked import SAFETY_BOUND
from rolloutdoctor.objective.corrections import SamplerCorrection
from rolloutdoctor.ops import segments as seg


@dataclass(frozen=True, eq=False)
class Rows:
    """Some whole rows with the log-probs of trainer and sampler, masked tokens included.

    Attributes:
        trainer_T: ``[T]`` log-probs of the trainer before the update, 0 at masked tokens.
        sampler_T: ``[T]`` log-probs of the sampler, 0 at masked tokens.
        mask_T: ``[T]`` bool, trained tokens.
        offsets: ``[N+1]`` int64 row offsets.
        micro_N: ``[N]`` int64, the row's micro-batch.
    """

    trainer_T: Tensor
    sampler_T: Tensor
    mask_T: Tensor
    offsets: Tensor
    micro_N: Tensor

    def row_sum(self, x_T: Tensor) -> Tensor:
        """Sum over the trained tokens of each row, ``[N]`` float64."""
        return seg.total(torch.where(self.mask_T, x_T, 0.0), self.offsets)

    @property
    def length_N(self) -> Tensor:
        """``[N]`` float64, trained tokens, 1 for a row without any."""
        return seg.total(self.mask_T, self.offsets).clamp(min=1)

    def row_mean(self, x_T: Tensor) -> Tensor:
        """Mean over the trained tokens of each row, ``[N]`` float64; 0 for a row without any."""
        return self.row_sum(x_T) / self.length_N

    def expand(self, x_N: Tensor) -> Tensor:
        """Give a row value to its tokens, in the dtype of the log-probs."""
        return seg.expand(x_N.to(self.trainer_T.dtype), self.offsets)

    def ratio(self, level: str) -> Tensor:
        """Trainer over sampler, ``[T]``: of the token, or the product or the geometric mean of its row."""
        log_T = self.trainer_T - self.sampler_T
        if level != "token":
            log_T = self.expand(self.row_sum(log_T) if level == "sequence" else self.row_mean(log_T))
        return log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp()


@dataclass(frozen=True, eq=False)
class Corrected:
    """Result of the helper for some rows.

    Attributes:
        kept_T: ``[T]`` bool, trained tokens that are not rejected.
        gate_T: ``[T]`` what the policy term is multiplied by: the weight, 0 where rejected.
        metrics: name to ``[T]``, which slime reduces like the loss, over the mask before rejection.
    """

    kept_T: Tensor
    gate_T: Tensor
    metrics: dict[str, Tensor]


def corrected(rows: Rows, rule: SamplerCorrection) -> Corrected:
    """Weights, rejections and the metrics of both; without `rule.weighs` only how far the sampler is."""
    metrics = _distance(rows)
    if not rule.weighs:
        return Corrected(rows.mask_T, torch.ones_like(rows.trainer_T), metrics)
    free_T = rows.ratio(rule.level)
    metrics["tis_weight_before_bound"] = free_T
    if rule.mode == "truncate":
        metrics["tis_truncate_fraction"] = free_T > rule.high
        weight_T = free_T.clamp(max=rule.high)
    else:
        metrics[f"tis_{rule.mode}_fraction_low"] = free_T < rule.low
        metrics[f"tis_{rule.mode}_fraction_high"] = free_T > rule.high
        weight_T = free_T.clamp(rule.low, rule.high) if rule.mode == "clip" else free_T
    weight_T = torch.where(rows.mask_T, weight_T, 0.0)
    metrics["tis_weight_after_bound"] = metrics["is_ratio_mean_after_tis_rs"] = weight_T
    kept_T = rows.mask_T
    if rule.mode == "mask":
        kept_T = kept_T & (free_T >= rule.low) & (free_T <= rule.high)
    if rule.reject_level is not None:
        kept_T = kept_T & _kept(rows, rule, rule.reject_level, metrics)
    if rule.normalised:
        factor_T = rows.expand(_factor(rows, weight_T, rule.level))
        weight_T = weight_T / factor_T
        metrics["batch_norm_factor"] = factor_T
    metrics["is_ratio_mean_final"] = rows.expand(rows.row_mean(weight_T))
    for name, extreme, fill in (("min", seg.low, math.inf), ("max", seg.high, -math.inf)):
        value_N = extreme(torch.where(rows.mask_T, weight_T, fill), rows.offsets)
        metrics[f"is_ratio_{name}_final"] = rows.expand(torch.where(value_N == fill, 0.0, value_N))
    return Corrected(kept_T, torch.where(kept_T, weight_T, 0.0), metrics)


def _kept(rows: Rows, rule: SamplerCorrection, level: str, metrics: dict[str, Tensor]) -> Tensor:
    """Tokens within the bounds, in rows without a token below the veto, ``[T]`` bool; adds the metrics."""
    ratio_T = rows.ratio(level)
    metrics["rs_mask_fraction_low"] = ratio_T < rule.reject_low
    metrics["rs_mask_fraction_high"] = ratio_T > rule.reject_high
    kept_T = (ratio_T >= rule.reject_low) & (ratio_T <= rule.reject_high)
    if rule.veto is None:
        return kept_T
    # The token's own ratio, not within the safety bound.
    low_T = rows.mask_T & (rows.trainer_T - rows.sampler_T < math.log(rule.veto))
    vetoed_T = seg.expand(rows.row_sum(low_T) > 0, rows.offsets)
    metrics["rs_catastrophic_token_fraction"], metrics["rs_catastrophic_seq_fraction"] = low_T, vetoed_T
    return kept_T & ~vetoed_T


def _factor(rows: Rows, weight_T: Tensor, level: str) -> Tensor:
    """Return the divisor of the weights of a micro-batch, ``[N]`` float64: their mean over tokens, or over rows."""
    micro_N = rows.micro_N
    if level == "token":
        total_M = seg.total_by(micro_N, rows.row_sum(weight_T))
        count_M = seg.total_by(micro_N, rows.row_sum(rows.mask_T)).clamp(min=1)
    else:
        total_M = seg.total_by(micro_N, rows.row_mean(weight_T))
        count_M = torch.bincount(micro_N).clamp(min=1)
    mean_M = total_M / count_M
    return torch.where(mean_M > 1e-8, mean_M, 1.0)[micro_N]


def _distance(rows: Rows) -> dict[str, Tensor]:
    """Perplexities, KL and chi-squared, ``[T]`` each. Source: ``add_ppl_metrics``."""
    trainer_N, sampler_N = rows.row_mean(rows.trainer_T), rows.row_mean(rows.sampler_T)
    gap_N, log_T = sampler_N - trainer_N, rows.trainer_T - rows.sampler_T
    square_N = rows.row_mean(log_T.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp().square())
    sum_N = rows.row_sum(log_T).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    by_row = {
        "training_log_ppl": -trainer_N,
        "training_ppl": (-trainer_N).exp(),
        "rollout_log_ppl": -sampler_N,
        "rollout_ppl": (-sampler_N).exp(),
        "log_ppl_diff": gap_N,
        "log_ppl_abs_diff": gap_N.abs(),
        "ppl_ratio": gap_N.exp(),
        "chi2_token": square_N - 1,
        "chi2_seq": (2 * sum_N).exp() - 1,
    }
    metrics = {name: seg.expand(x_N, rows.offsets) for name, x_N in by_row.items()}
    return metrics | {"kl": -log_T, "k3_kl": log_T.exp() - log_T - 1}

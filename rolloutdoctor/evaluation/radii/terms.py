"""Radii of single terms of the KL and the policy loss."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import KlTerm
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius


def sides(evaluation: Evaluation) -> int:
    """Return how often the roundings of a token count: in the trainer's number, and in ours if it is float32."""
    return 2 if evaluation.dtype == torch.float32 else 1


def kl_terms(evaluation: Evaluation, term: KlTerm, size_N: Tensor, count_N: Tensor) -> Radius:
    """Radius of the KL terms of each row, ``[N]``, given their sum: that of the terms and of their addition."""
    radius = rounding.kl(term.estimator, size_N, count_N)
    old = term.ratio_to or evaluation.objective.surrogate.old
    if term.ratio_weighted and not on_policy(evaluation, old):
        # Each term is multiplied by a ratio, whose own relative radius it takes over.
        radius = radius + relative_ratio(evaluation, size_N, old)
    return radius * sides(evaluation) + rounding.total(size_N, count_N)


def on_policy(evaluation: Evaluation, old: str | None = None) -> bool:
    """True if policy and old log-probs (by default the surrogate's) are one column, so that every ratio is 1."""
    batch = evaluation.batch
    return batch.stored_name(old or evaluation.objective.surrogate.old) == batch.stored_name("policy_log_probs")


def relative_ratio(evaluation: Evaluation, size_N: Tensor, old: str | None = None) -> Radius:
    """Radius of terms that a ratio multiplies: ``u (|d| + 2 EXP_ULPS + 1)`` of them, d the row's largest log-ratio."""
    batch = evaluation.batch
    old_T = batch.column(old or evaluation.objective.surrogate.old).double()
    drift_T = batch.column("policy_log_probs").double() - old_T
    drift_T = torch.where(batch.column("response_mask"), drift_T, 0.0).abs().nan_to_num(0.0)
    largest_N = seg.high(drift_T, batch.rows).clamp(min=0)
    return rounding.stored(size_N * (largest_N + 2 * rounding.EXP_ULPS + 1))


def importance_weight(evaluation: Evaluation, gate: TermWeight) -> tuple[Tensor, Radius]:
    """Largest importance weight of a token of each row, and the relative radius of the row's weights, ``[N]`` each.

    A weight ``exp(d)`` is off by ``u (|d| + 2 EXP_ULPS + 1)`` of itself, and one of a row by its sum besides.
    """
    batch = evaluation.batch
    drift_T = batch.column(gate.of).double() - batch.column(gate.against).double()
    drift_T = torch.where(batch.column("response_mask"), drift_T, 0.0).nan_to_num(0.0)
    if gate.log_ratio_bound is not None:
        drift_T = drift_T.clamp(-gate.log_ratio_bound, gate.log_ratio_bound)
    size_N, length_N = seg.total(drift_T.abs(), batch.rows), seg.trues(batch.column("response_mask"), batch.rows)
    if gate.level in ("token", "largest"):
        drift_N = seg.high(drift_T, batch.rows).clamp(min=0)
        size_N = seg.high(drift_T.abs(), batch.rows).clamp(min=0)
        lost = rounding.stored(size_N + 2 * rounding.EXP_ULPS + 1)
    else:
        count_N = length_N.clamp(min=1) if gate.level == "geometric" else torch.ones_like(length_N)
        drift_N = seg.total(drift_T, batch.rows) / count_N
        lost = rounding.total(size_N, length_N.clamp(min=1)) * (1 / count_N)
        lost = lost + rounding.stored(size_N / count_N + 2 * rounding.EXP_ULPS + 1)
    largest_N = torch.ones_like(size_N) if gate.indicator else drift_N.exp()
    return (largest_N if gate.high is None else largest_N.clamp(max=gate.high)), lost * sides(evaluation)


def row_log_ratios(batch: RolloutBatch, numerator: str, denominator: str) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the log-ratios of two log-probs over the trained tokens of each row, ``[N]`` float64.

    Returns:
        The sums, the sums of the absolute log-probs that they are differences of, and how many tokens there are.
    """
    mask_T = batch.column("response_mask")
    over_T, under_T = (batch.column(name).double().nan_to_num(0.0) for name in (numerator, denominator))
    total_N = seg.total(torch.where(mask_T, over_T - under_T, 0.0), batch.rows)
    size_N = seg.total(torch.where(mask_T, over_T.abs() + under_T.abs(), 0.0), batch.rows)
    return total_N, size_N, seg.trues(mask_T, batch.rows).double()


def over_forwards(layout: Layout) -> Tensor:
    """Weight of each row in a mean over forward passes of their means over rows, ``[N]`` float64."""
    return 1 / (layout.forward_rows_N * (1 / layout.forward_rows_N).sum())

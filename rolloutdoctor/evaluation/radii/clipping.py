"""Radii of shares of clipped tokens: where a ratio lies at a bound to rounding, or an advantage at 0, either may be.

Between two libraries, or a CPU and a GPU, `exp` differs by an ulp, and of many tokens some ratio lies within that of a
bound. An advantage that is 0 in exact arithmetic is 0 or residue of either sign.
"""

from math import inf, log

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.terms import on_policy, over_forwards, row_log_ratios, sides
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius


@remembered
def undecided(evaluation: Evaluation) -> Tensor:
    """Return how many trained tokens of each row rounding may count as clipped or not, ``[N]`` float64."""
    batch, rule = evaluation.batch, evaluation.objective.surrogate
    assert evaluation.tokens is not None
    bounds = _bounds(rule)
    if on_policy(evaluation) or not bounds or not batch.tokens:
        return torch.zeros(len(batch), dtype=torch.float64, device=batch.device)
    if rule.bounds_probabilities:
        return seg.trues(undecided_tokens(evaluation), batch.rows).double()
    return _of_tokens(evaluation, bounds) if rule.level == "token" else _of_rows(evaluation, bounds)


def _bounds(rule: Surrogate) -> list[float]:
    """Log-ratios at which a token becomes a clipped one."""
    if rule.kind == "cispo_capped":
        ratios = [rule.clip_high]
    else:
        ratios = [1 - rule.clip_low, 1 + rule.clip_high, *([] if rule.cap is None else [rule.cap])]
    return [log(ratio) for ratio in ratios if ratio > 0]


def _lost(log_ratio: "Tensor | float") -> Tensor:
    """Bound the effect of rounding on the log of a ratio ``exp(d)`` and of a bound: ``u (|d| + 2 EXP_ULPS + 1)``."""
    return rounding.stored(torch.as_tensor(log_ratio, dtype=torch.float64).abs() + 2 * rounding.EXP_ULPS + 1).likely


def _of_tokens(evaluation: Evaluation, bounds: list[float]) -> Tensor:
    batch, mask_T = evaluation.batch, evaluation.batch.column("response_mask")
    drift_T = batch.column("policy_log_probs") - batch.column(evaluation.objective.surrogate.old)
    near_T = torch.zeros_like(mask_T)
    for bound in bounds:
        # The difference itself is rounded here as it is in the trainer.
        near_T |= (drift_T - bound).abs_() <= float(_lost(bound)) * (sides(evaluation) + 1)
    near_T &= mask_T
    found_N = seg.trues(near_T, batch.rows).double()
    flat_T = _without_a_sign(evaluation)
    if flat_T is not None:
        near_T = mask_T & flat_T & ~near_T & ((drift_T > min(bounds, key=_above)) | (drift_T < min(bounds)))
        found_N += seg.trues(near_T, batch.rows)
    return found_N


def undecided_tokens(evaluation: Evaluation) -> Tensor:
    """Trained tokens whose change of probability is at a bound to rounding, or beyond one that an open sign chooses.

    ``[T]`` bool. Two exponentials of stored log-probs differ, each at most one: off by ``u (2 EXP_ULPS + |l|) p``.
    """
    batch, rule = evaluation.batch, evaluation.objective.surrogate
    new_T, old_T = (batch.column(name).double() for name in ("policy_log_probs", rule.old))
    risen_T = new_T.exp() - old_T.exp()
    lost_T = rounding.stored((2 * rounding.EXP_ULPS + 2 + new_T.abs()) * new_T.exp()).likely
    lost_T += rounding.stored((2 * rounding.EXP_ULPS + 2 + old_T.abs()) * old_T.exp()).likely
    open_T = torch.minimum((risen_T - rule.clip_high).abs(), (risen_T + rule.clip_low).abs()) <= lost_T * sides(
        evaluation
    )
    flat_T = _without_a_sign(evaluation)
    if flat_T is not None:
        open_T |= flat_T & ((risen_T > rule.clip_high) | (risen_T < -rule.clip_low))
    return open_T & batch.column("response_mask")


def _above(bound: float) -> float:
    """Orders bounds so that the least one above 0 comes first."""
    return bound if bound > 0 else inf


def _of_rows(evaluation: Evaluation, bounds: list[float]) -> Tensor:
    """Tokens that are undecided; for ratios of rows, all tokens of a row or none."""
    batch, rule = evaluation.batch, evaluation.objective.surrogate
    drift_N, size_N, length_N = row_log_ratios(batch, "policy_log_probs", rule.old)
    if rule.level != "sequence-sum":
        drift_N, size_N = (x_N / length_N.clamp(min=1) for x_N in (drift_N, size_N))
    lost_N = (rounding.total(size_N, length_N.clamp(min=1)).likely + _lost(drift_N)) * sides(evaluation)
    near_N = torch.zeros_like(drift_N, dtype=torch.bool)
    for bound in bounds:
        near_N |= (drift_N - bound).abs() <= lost_N
    found_N, flat_T = near_N * length_N, _without_a_sign(evaluation)
    if flat_T is None:
        return found_N
    beyond_N = (drift_N > min(bounds, key=_above)) | (drift_N < min(bounds))
    return torch.where(near_N, found_N, seg.trues(batch.column("response_mask") & flat_T, batch.rows) * beyond_N)


def _without_a_sign(evaluation: Evaluation) -> Tensor | None:
    """Tokens whose advantage is 0 to rounding, ``[T]`` bool; None if there are none."""
    rows = evaluation.rows
    assert rows is not None
    if rows.advantage_N is not None:
        flat_N = rows.advantage_N.abs() <= advantage_radius(evaluation).likely
        return seg.expand(flat_N, evaluation.batch.rows) if bool(flat_N.any()) else None
    assert rows.advantage_T is not None
    flat_T = rows.advantage_T.abs() <= token_advantage_radius(evaluation).likely
    return flat_T if bool(flat_T.any()) else None


def clip_share_radius(evaluation: Evaluation) -> Radius:
    """Radius of a mean over tokens, or over rows, of what is clipped: the weight of what is undecided.

    Trainers take the mean over all tokens, over micro-batches of their token means, or as the loss does: a token's
    weight is the largest of these.
    """
    rows, tokens = evaluation.rows, evaluation.tokens
    assert tokens is not None
    assert rows is not None
    assert rows.length_N is not None
    layout, open_N, length_N = tokens.layout, undecided(evaluation), rows.length_N.double()
    over_forwards_N = over_forwards(layout)
    of_forward_N = over_forwards_N * layout.forward_rows_N / layout.forward_total(length_N).clamp(min=1)
    of_micro_N = 1 / (layout.micro_total(length_N).clamp(min=1) * layout.micros_N)
    weight_N, level = torch.maximum(of_forward_N, of_micro_N), evaluation.objective.surrogate.level
    if level != "sequence-sum":  # else the loss weighs rows, not tokens
        weight_N = torch.maximum(weight_N, tokens.weight_N.abs().double())
    share = (open_N * weight_N).sum()
    return Radius.of(share if level == "token" else torch.maximum(share, ((open_N > 0) * over_forwards_N).sum()))


def row_share_radius(evaluation: Evaluation) -> Radius:
    """Radius of a mean over rows of the share of their tokens that is clipped."""
    rows = evaluation.rows
    assert rows is not None
    assert rows.length_N is not None
    share_N = undecided(evaluation) / rows.length_N.clamp(min=1)
    counted_N = evaluation.in_scope(evaluation.objective.denominator)
    return Radius.of((share_N * counted_N).sum() / counted_N.sum().clamp(min=1))


def chosen_k3_radius(evaluation: Evaluation, value: float) -> Radius:
    """Radius of a mean over rows of the mean k3 to the sampler of their clipped, or of their other, tokens.

    A token at a bound moves the mean of its row by the largest k3 of the row at most.
    """
    batch = evaluation.batch
    drift_T = batch.column("policy_log_probs").double() - batch.column(evaluation.objective.surrogate.old).double()
    k3_T = torch.where(batch.column("response_mask"), drift_T.exp() - drift_T - 1, 0.0).nan_to_num(0.0)
    counted_N = evaluation.in_scope(evaluation.objective.denominator)
    reach_N = seg.high(k3_T, batch.rows).clamp(min=0) * (undecided(evaluation) > 0) * counted_N
    radius = rounding.k3(value) * sides(evaluation) + rounding.mean(value, max(batch.tokens, 1))
    return radius + Radius.of(reach_N.sum() / counted_N.sum().clamp(min=1))


def clip_extreme_radius(evaluation: Evaluation) -> Radius:
    """Radius of the largest or smallest clipped share of a row: no row's share moves farther."""
    rows = evaluation.rows
    assert rows is not None
    assert rows.length_N is not None
    open_N = undecided(evaluation)
    if evaluation.objective.surrogate.level != "token":
        open_N = (open_N > 0) * rows.length_N
    return Radius.of((open_N / rows.length_N.clamp(min=1)).max() if len(open_N) else 0.0)

"""Radii of the metrics that trainers log."""

from collections.abc import Callable
from functools import partial
from math import isfinite, sqrt

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, stored_kl
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, score_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.clipping import (
    chosen_k3_radius,
    clip_extreme_radius,
    clip_share_radius,
    row_share_radius,
)
from rolloutdoctor.evaluation.radii.loss import (
    kl_loss_radius,
    kl_radius,
    loss_radius,
    policy_loss_radius,
    policy_radius,
)
from rolloutdoctor.evaluation.radii.row_weight import row_weight_radius
from rolloutdoctor.evaluation.radii.terms import kl_terms, sides
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.evaluation.scores import reward_kl_tokens
from rolloutdoctor.formulas import kl
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius


def _mean_kl(evaluation: Evaluation, _: float) -> Radius:
    """KL of the loss as a metric, coefficient left out, whichever of its tokens' means a trainer logs.

    TRL averages over the tokens of each micro-batch and then over these, verl and slime as the loss does: a token's
    weight is the larger of the two.
    """
    tokens, rows = evaluation.tokens, evaluation.rows
    if evaluation.objective.kl_loss is None:
        return _row_kl(evaluation)
    assert tokens is not None
    assert rows is not None
    assert rows.length_N is not None
    layout = tokens.layout
    length_N = rows.length_N * evaluation.in_scope(evaluation.objective.metric)
    of_forward_N = 1 / (layout.forward_total(length_N).clamp(min=1) * (1 / layout.forward_rows_N).sum())
    weight_N = torch.maximum(of_forward_N, tokens.weight_N.abs())
    size_N = tokens.kl_N.abs().nan_to_num(0.0)
    return (kl_radius(evaluation) * weight_N).sum() + rounding.total((size_N * weight_N).sum(), len(size_N) + 8)


def _kl_mean(evaluation: Evaluation, value: float) -> Radius:
    """The same with its coefficient; of a loss without a KL term it is 0."""
    term = evaluation.objective.kl_loss
    return Radius.of(0.0) if term is None else _mean_kl(evaluation, value) * term.coef


def _reference_kl(estimator: str, weighted: bool, evaluation: Evaluation, _: float) -> Radius:
    """Mean over the trained tokens of a KL to the reference that need not be that of the loss."""
    batch, objective = evaluation.batch, evaluation.objective
    if "ref_log_probs" not in batch.per_token:
        return Radius.of(0.0)
    mask_T, names = batch.column("response_mask"), ("policy_log_probs", "ref_log_probs", objective.surrogate.old)
    policy_t, reference_t, old_t = (batch.column(name)[mask_T].double() for name in names)
    u_t = (policy_t - reference_t).clamp(-40, 40)
    size_t = kl.ESTIMATORS[estimator](u_t)[0].abs()
    if weighted:
        drift_t = (policy_t - old_t).nan_to_num(0.0)
        size_t = size_t * drift_t.exp() * (1 + drift_t.abs())
    size, count = float(size_t.nan_to_num(0.0).sum()), max(len(u_t), 1)
    radius = rounding.kl(estimator, size, count) * (sides(evaluation) * (4 if weighted else 1))
    return (radius + rounding.total(size, count + 8)) * (1 / count)


def _policy_mean(evaluation: Evaluation, _: float) -> Radius:
    """Mean of the policy terms over the trained tokens of the step, whatever the loss divides by."""
    tokens, rows = evaluation.tokens, evaluation.rows
    assert tokens is not None
    assert rows is not None
    assert rows.length_N is not None
    size_N, count = tokens.policy_N.abs().nan_to_num(0.0), float(rows.length_N.sum().clamp(min=1))
    return (policy_radius(evaluation).sum() + rounding.total(size_N.sum(), len(size_N) + 8)) * (1 / count)


def _row_kl(evaluation: Evaluation) -> Radius:
    """KL of the penalty in the reward as a mean over rows of the sums of their tokens."""
    batch, term = evaluation.batch, evaluation.objective.kl_reward
    assert term is not None
    kl_T = reward_kl_tokens(batch, evaluation.objective, evaluation.dtype)
    assert kl_T is not None
    size_N, rows = seg.total(kl_T.abs(), batch.rows), max(len(batch), 1)
    radius = kl_terms(evaluation, term, size_N, batch.rows.diff().clamp(min=1).double())
    return (radius.sum() + rounding.total(size_N.sum(), rows + 1)) * (1 / rows)


def _reward_kl(evaluation: Evaluation, _: float) -> Radius:
    """KL of the penalty in the reward: a mean over all tokens, or over rows of their tokens' means."""
    batch, term = evaluation.batch, evaluation.objective.kl_reward
    assert term is not None
    kl_T = reward_kl_tokens(batch, evaluation.objective, evaluation.dtype)
    assert kl_T is not None
    return _either_mean(token_kl_radius(evaluation, kl_T), kl_T, batch.rows)


def _stored_kl(evaluation: Evaluation, _: float) -> Radius:
    """Return the radius of the KL that the trainer stored: the KL itself, or the reward buffer."""
    kl_T = stored_kl(evaluation.batch, evaluation.objective, evaluation.dtype)
    assert kl_T is not None
    return stored_mean_radius(evaluation, kl_T)


def stored_mean_radius(evaluation: Evaluation, stored_T: Tensor) -> Radius:
    """Radius of the mean of what is stored as KL, and of its rounding when it is logged."""
    radius = _either_mean(token_kl_radius(evaluation, stored_T), stored_T, evaluation.batch.rows)
    return radius + rounding.stored(stored_T.double().nan_to_num(0.0).mean() if len(stored_T) else 0.0)


def token_kl_radius(evaluation: Evaluation, stored_T: Tensor) -> Radius:
    """Radius of each stored KL, or of each value of a reward buffer made of them, ``[T]``."""
    term = evaluation.objective.kl_reward
    assert term is not None
    kl_T = reward_kl_tokens(evaluation.batch, evaluation.objective, evaluation.dtype)
    assert kl_T is not None
    radius = rounding.kl(term.estimator, kl_T.double().abs().nan_to_num(0.0)) * (
        sides(evaluation) * max(term.coef, 1.0)
    )
    return radius + rounding.stored(stored_T.nan_to_num(0.0)) * 2


def _either_mean(radius: Radius, x_T: Tensor, rows: Tensor) -> Radius:
    """Radius of the mean of some token values, taken over tokens or over rows of their means, whichever is larger."""
    length_N = rows.diff().clamp(min=1).double()
    weight_T = torch.maximum(
        seg.expand(1 / (length_N * max(len(length_N), 1)), rows), x_T.new_tensor(1 / max(len(x_T), 1)).double()
    )
    magnitude = (x_T.double().abs().nan_to_num(0.0) * weight_T).sum()
    return (radius * weight_T).sum() + rounding.mean(magnitude, max(len(x_T), 1))


def _drift(evaluation: Evaluation, value: float) -> Radius:
    """Mean difference of old and policy log-probs: each is rounded once, and both signs are there."""
    batch, tokens = evaluation.batch, evaluation.tokens
    assert tokens is not None
    drift_T = batch.column("policy_log_probs").double() - batch.column(evaluation.objective.surrogate.old).double()
    size_N = seg.total(torch.where(batch.column("response_mask"), drift_T.abs(), 0.0).nan_to_num(0.0), batch.rows)
    weight_N = torch.maximum(tokens.weight_N.abs(), size_N.new_tensor(1 / max(float(batch.trained[-1]), 1.0)))
    magnitude = (size_N * weight_N).sum()
    return rounding.stored(magnitude) * 2 * sides(evaluation) + rounding.mean(magnitude, max(batch.tokens, 1))


def _sampler_drift(evaluation: Evaluation, value: float) -> Radius:
    """Mean or largest difference of the policy's log-probs and the sampler's, or half of its square."""
    batch = evaluation.batch
    size = abs(value)
    if batch.has("policy_log_probs", "rollout_log_probs", "response_mask") and batch.tokens:
        drift_T = batch.column("policy_log_probs").double() - batch.column("rollout_log_probs").double()
        drift_T = drift_T[batch.column("response_mask")].abs().nan_to_num(0.0)
        size = max(size, float(drift_T.mean())) if len(drift_T) else size
    return rounding.stored(size) * 4 * sides(evaluation) + rounding.mean(size, max(batch.tokens, 1))


def _advantages(evaluation: Evaluation, value: float) -> Radius:
    """Mean, least or largest advantage: the largest radius of a row, and a sum over all tokens."""
    rows, batch = evaluation.rows, evaluation.batch
    assert rows is not None
    if rows.advantage_N is not None:
        radius, size = advantage_radius(evaluation), rows.advantage_N.abs().nan_to_num(0.0)
        return Radius(radius.largest.max(), radius.likely.max()) + rounding.mean(size.max(), max(batch.tokens, 1))
    return token_advantage_radius(evaluation)


def _rewards(evaluation: Evaluation, value: float) -> Radius:
    """Mean, extreme or standard deviation of the rewards, or of the scores that are made of them."""
    radius, size = _scores(evaluation)
    largest = max(size, abs(value)) if len(evaluation.batch) else size
    return radius * 2 + rounding.std(largest, largest, max(len(evaluation.batch), 1))


@remembered
def _scores(evaluation: Evaluation) -> tuple[Radius, float]:
    """The largest radius of a score, and the largest score."""
    rows = evaluation.rows
    assert rows is not None
    if not len(rows.score_N):
        return Radius.of(0.0), 0.0
    score = score_radius(evaluation) + rounding.stored(rows.score_N.nan_to_num(0.0))
    size = rows.score_N.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return Radius(float(score.largest.max()), float(score.likely.max())), float(size)


def _sampler_gap(evaluation: Evaluation, value: float) -> Radius:
    """Return the radius of a comparison of sampler and trainer: differences, ratios, exponentials of float32 means."""
    batch = evaluation.batch
    if not batch.has("old_log_probs", "rollout_log_probs") or not batch.tokens:
        return rounding.stored(value) * 8
    of_means, growth = _sampler_means(evaluation)
    # The exponential of a mean is off by its own size times the radius of the mean; a k3 of the gap loses like one.
    return of_means * (max(1.0, abs(value)) * growth * 2) + rounding.k3(value) + rounding.stored(value) * 8


@remembered
def _sampler_means(evaluation: Evaluation) -> tuple[Radius, float]:
    """Radius of the two mean log-probs together, and the exponential of the first one's size."""
    batch = evaluation.batch
    ours, its = (
        batch.column(name).double().abs().nan_to_num(0.0).mean() for name in ("old_log_probs", "rollout_log_probs")
    )
    of_both = rounding.mean(float(ours), batch.tokens) + rounding.mean(float(its), batch.tokens)
    return of_both, float(ours.exp())


def _values(evaluation: Evaluation, value: float) -> Radius:
    """Mean or extreme of the critic's values, which have both signs."""
    batch = evaluation.batch
    size = batch.column("values").double().abs().nan_to_num(0.0) if batch.has("values") else torch.zeros(1)
    return rounding.mean(size.max() if len(size) else abs(value), max(batch.tokens, 1))


def _ratio(evaluation: Evaluation, value: float) -> Radius:
    """Mean over the trained tokens of the ratio to the old policy."""
    count = max(int(evaluation.batch.trained[-1]), 1)
    return rounding.ratio(abs(value) * count, count) * (sides(evaluation) / count) + _mean(evaluation, value)


def _ratio_spread(evaluation: Evaluation, value: float) -> Radius:
    """Mean square of such means about their own mean, of parts whose largest mean is that much above 1."""
    radius = _ratio(evaluation, 1 + sqrt(abs(value) * max(int(evaluation.batch.trained[-1]), 1)))
    return radius * (4 * sqrt(abs(value)) + 4 * float(radius)) + _mean(evaluation, value)


def _mean(evaluation: Evaluation, value: float) -> Radius:
    """A count, a share or a mean of values of one sign."""
    return (
        rounding.mean(abs(value), max(evaluation.batch.tokens, len(evaluation.batch), 1)) + rounding.stored(value) * 8
    )


def _sampler_k3(evaluation: Evaluation, value: float) -> Radius:
    """Mean or largest k3 between the policy and the sampler: each token's own rounding, and that of the mean."""
    return rounding.k3(value) * sides(evaluation) + _mean(evaluation, value)


def _k3_over_entropy(evaluation: Evaluation, value: float) -> Radius:
    """Quotient of such a mean and the mean entropy of the trained tokens."""
    batch = evaluation.batch
    kept_T = batch.column("entropy")[batch.column("response_mask")].double()
    entropy = float(kept_T.mean()) if len(kept_T) else 1.0
    return _sampler_k3(evaluation, value * entropy) * (1 / entropy) + _mean(evaluation, value)


def _heaviest(evaluation: Evaluation) -> float:
    """How many times a loss can be logged whose micro-batches are weighted by their tokens once more."""
    tokens, rows = evaluation.tokens, evaluation.rows
    assert tokens is not None
    assert rows is not None
    assert rows.length_N is not None
    layout = tokens.layout
    times_N = layout.micros_N * layout.micro_total(rows.length_N) / rows.length_N.sum().clamp(min=1) / layout.share_N
    return float(times_N.max()) if len(times_N) else 1.0


def _token_weighted_kl(evaluation: Evaluation, value: float) -> Radius:
    if evaluation.objective.kl_loss is None:
        return _reward_kl(evaluation, value)
    return _mean_kl(evaluation, value) * _heaviest(evaluation)


METRICS: dict[str, Callable[[Evaluation, float], Radius]] = {
    "advantages": _advantages,
    "chosen_k3": chosen_k3_radius,
    "clip_extreme": lambda evaluation, value: clip_extreme_radius(evaluation) + _mean(evaluation, value),
    "clip_share": lambda evaluation, value: clip_share_radius(evaluation) + _mean(evaluation, value),
    "drift": _drift,
    "entropy": _mean,
    "k3_over_entropy": _k3_over_entropy,
    "kl": _mean_kl,
    "kl_loss": lambda evaluation, _: kl_loss_radius(evaluation),
    "kl_mean": _kl_mean,
    "loss": lambda evaluation, _: loss_radius(evaluation),
    "mean": _mean,
    "policy_loss": lambda evaluation, _: policy_loss_radius(evaluation),
    "policy_mean": _policy_mean,
    **{f"reference_{name}": partial(_reference_kl, name, False) for name in ("k1", "k2", "k3")},
    "reference_k1_ratio": partial(_reference_kl, "k1", True),
    "ratio": _ratio,
    "ratio_spread": _ratio_spread,
    "reward_kl": _reward_kl,
    "rewards": _rewards,
    "row_share": lambda evaluation, value: row_share_radius(evaluation) + _mean(evaluation, value),
    "row_weight": lambda evaluation, value: row_weight_radius(evaluation) + _mean(evaluation, value),
    "sampler_drift": _sampler_drift,
    "sampler_k3": _sampler_k3,
    "sampler_gap": _sampler_gap,
    "stored_kl": _stored_kl,
    "token_weighted_kl": _token_weighted_kl,
    "token_weighted_loss": lambda evaluation, _: policy_loss_radius(evaluation) * _heaviest(evaluation),
    "values": _values,
    "zero_std": _mean,
}
"""Radius of a metric given its recomputed value, by its kind as trainers name it in `trainers.spec.Log.quantities`."""


def metric_radius(evaluation: Evaluation, kind: str, value: float) -> Radius:
    """Radius of a logged metric: that of the quantity, and the rounding of the logged value.

    Args:
        evaluation: of the step.
        kind: what the metric is, a name in `METRICS`; `Trainer.log.kind_of` tells it.
        value: as recomputed.
    """
    radius = METRICS[kind](evaluation, value)
    # The trainer stores its own value, which lies up to the radius from this one.
    size = abs(value) + float(radius)
    return radius + rounding.stored(size if isfinite(size) else 0.0)

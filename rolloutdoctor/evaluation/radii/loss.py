"""Radii of the KL, the policy terms and the loss of an evaluation.

The radii are those of the trainer's float32 arithmetic, whatever the dtype of the evaluation, and follow from sums per
row: no token is read again where the terms have one sign per row. Sums of the evaluation itself are float64 and lose
nothing that counts. An evaluation in float32 has its own roundings per token; they are within the same bounds, so its
terms count twice.
"""

from math import isnan

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.clipping import undecided_tokens
from rolloutdoctor.evaluation.radii.remembered import remembered_by_row
from rolloutdoctor.evaluation.radii.terms import (
    importance_weight,
    kl_terms,
    on_policy,
    relative_ratio,
    row_log_ratios,
    sides,
)
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.rounding import Radius


@remembered_by_row
def kl_radius(evaluation: Evaluation) -> Radius:
    """Radius of the summed KL of the loss of each row, ``[N]``."""
    tokens, rows, term = evaluation.tokens, evaluation.rows, evaluation.objective.kl_loss
    assert tokens is not None
    assert rows is not None
    assert rows.length_N is not None
    assert term is not None
    size_N = tokens.kl_N.abs()
    if term.estimator == "k1":
        batch = evaluation.batch
        assert term.reference is not None  # only a penalty in the reward may have none
        u_T = batch.column(term.log_probs).double() - batch.column(term.reference).double()
        size_N = seg.total(torch.where(batch.column("response_mask"), u_T.abs(), 0.0), batch.rows)
    return kl_terms(evaluation, term, size_N.nan_to_num(0.0), rows.length_N)


@remembered_by_row
def policy_radius(evaluation: Evaluation) -> Radius:
    """Radius of the summed policy terms of each row, ``[N]``.

    A term is the advantage times a function of the ratio: its size bounds the ratio's roundings (`rounding.ratio`), and
    the radius of the advantage moves it in proportion. Terms of a row whose tokens share the advantage have one sign,
    so that their sum is that of their sizes; else the tokens are evaluated.
    """
    rows, tokens = evaluation.rows, evaluation.tokens
    assert rows is not None
    assert tokens is not None
    assert rows.length_N is not None
    length_N, surrogate = rows.length_N, evaluation.objective.surrogate
    if rows.advantage_N is None or surrogate.moves_without_advantage:
        return _policy_tokens(evaluation)
    size_N = tokens.policy_N.abs().nan_to_num(0.0)
    advantage_N = rows.advantage_N.abs().nan_to_num(0.0)
    over_N = torch.where(advantage_N > 0, size_N / advantage_N, 0.0)
    radius = rounding.ratio(over_N, length_N) * advantage_N
    if surrogate.level != "token" and not on_policy(evaluation):
        radius = radius + relative_ratio(evaluation, size_N) * length_N.clamp(min=1).sqrt()
    radius = radius + _of_row_weights(evaluation, size_N)
    moved = advantage_radius(evaluation) * torch.maximum(over_N, length_N)
    if surrogate.bounds_probabilities and not on_policy(evaluation):
        moved = moved + Radius.of(_at_a_bound(evaluation) * advantage_N)
    return radius * sides(evaluation) + rounding.total(size_N, length_N.clamp(min=1)) + moved


def _at_a_bound(evaluation: Evaluation) -> Tensor:
    """Ratios of the tokens that rounding may keep or drop, times the log-prob where that is in the term, ``[N]``."""
    batch, surrogate = evaluation.batch, evaluation.objective.surrogate
    policy_T = batch.column("policy_log_probs").double()
    size_T = (policy_T - batch.column(surrogate.old).double()).exp()
    size_T = size_T if surrogate.live_ratio else size_T.clamp(max=surrogate.cap or torch.inf) * policy_T.abs()
    return seg.total(torch.where(undecided_tokens(evaluation), size_T, 0.0), batch.rows)


def _of_row_weights(evaluation: Evaluation, size_N: Tensor) -> Radius:
    """Radius of terms that a product of a row's ratios multiplies: that of the sum of its log-ratios, relative."""
    radius = Radius.of(torch.zeros_like(size_N))
    for gate in evaluation.objective.gates:
        if gate.kind == "importance" and gate.level != "token" and not gate.indicator:
            _, of_row_N, length_N = row_log_ratios(evaluation.batch, gate.of, gate.against)
            if gate.level == "pack":
                assert evaluation.tokens is not None
                of_row_N, length_N = map(evaluation.tokens.layout.micro_total, (of_row_N, length_N))
            count_N = length_N.clamp(min=1)
            of_sum = rounding.total(of_row_N, count_N) * (1.0 if gate.level == "sequence" else 1 / count_N)
            radius = radius + of_sum * size_N
    return radius


def _policy_tokens(evaluation: Evaluation) -> Radius:
    """Rounding radius of the policy loss of each row, from the terms of its tokens."""
    batch, rows = evaluation.batch, evaluation.rows
    assert rows is not None
    assert rows.length_N is not None
    alone = evaluate(batch, evaluation.objective, dtype=evaluation.dtype, per_token=True, logged={})
    assert alone.per_token is not None
    assert alone.tokens is not None
    weight_N = alone.tokens.policy_weight_N.clamp(min=1e-300)
    size_N = seg.total(alone.per_token.loss_T.abs(), batch.rows) / weight_N
    largest_N = relative_ratio(evaluation, size_N) if not on_policy(evaluation) else rounding.stored(size_N) * 8
    chain_N = rows.length_N.clamp(min=1)
    if rows.advantage_T is not None:
        # Every advantage may move by as much, and its term by that times its ratio.
        reach_T = torch.where(batch.column("response_mask"), alone.per_token.ratio_T.double().clamp(min=1), 0.0)
        moved = token_advantage_radius(evaluation) * seg.total(reach_T, batch.rows)
    else:
        # Whitening has a rounding for every token of the step.
        moved = rounding.total(size_N * 3, chain_N) + rounding.total(size_N, chain_N.sum())
        reach_T = alone.per_token.ratio_T.double().clamp(min=1) * batch.column("policy_log_probs").abs().clamp(min=1)
        reach_T = torch.where(batch.column("response_mask"), reach_T, 0.0)
        moved = moved + advantage_radius(evaluation) * seg.total(reach_T, batch.rows)
    return largest_N * sides(evaluation) + rounding.total(size_N, chain_N) + moved


@remembered
def loss_radius(evaluation: Evaluation) -> Radius:
    """Radius of the step's loss: the radii of its rows by their weights, and the addition of the rows."""
    radius = policy_loss_radius(evaluation)
    if evaluation.objective.kl_loss is not None:
        radius = radius + kl_loss_radius(evaluation)
    if evaluation.objective.entropy_bonus is None or isnan(evaluation.entropy_loss):
        return radius
    # The bonus is a mean of values of one sign.
    return radius + rounding.mean(abs(evaluation.entropy_loss), max(evaluation.batch.tokens, 1))


def policy_loss_radius(evaluation: Evaluation) -> Radius:
    """Radius of the policy part of the step's loss."""
    tokens = evaluation.tokens
    assert tokens is not None
    weight_N = tokens.policy_weight_N.abs()
    size_N = torch.maximum(tokens.policy_N.abs(), tokens.loss_at_ratio_one_N.abs()).nan_to_num(0.0)
    return (policy_radius(evaluation) * weight_N).sum() + rounding.total((size_N * weight_N).sum(), len(size_N) + 8)


def kl_loss_radius(evaluation: Evaluation) -> Radius:
    """Radius of the KL part of the step's loss, coefficient included."""
    tokens, term = evaluation.tokens, evaluation.objective.kl_loss
    assert tokens is not None
    assert term is not None
    weight_N = (tokens.weight_N * evaluation.in_scope(evaluation.objective.kl) * term.coef).abs()
    size_N, radius = tokens.kl_N.abs().nan_to_num(0.0), kl_radius(evaluation)
    for gate in evaluation.objective.gates:
        if gate.on_kl and gate.kind == "importance":
            largest_N, lost = importance_weight(evaluation, gate)
            weight_N, radius = weight_N * largest_N, radius + lost * size_N
        elif gate.on_kl and gate.kind == "off_policy":
            radius = radius + Radius.of(torch.where(undecided_rows(evaluation, gate), size_N, 0.0))
    return (radius * weight_N).sum() + rounding.total((size_N * weight_N).sum(), len(size_N) + 8)


def undecided_rows(evaluation: Evaluation, gate: TermWeight) -> Tensor:
    """Rows that rounding may put on either side of a mask of off-policy rows, ``[N]`` bool.

    Their drift is at the bound to rounding, or above it with an advantage that is 0 to rounding.
    """
    batch, rows = evaluation.batch, evaluation.rows
    assert rows is not None
    if rows.advantage_N is None or gate.high is None:
        return torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
    drift_N, size_N, length_N = row_log_ratios(batch, gate.against, "policy_log_probs")
    count_N = length_N.clamp(min=1)
    lost_N = (rounding.total(size_N, count_N).likely / count_N + rounding.stored(gate.high).likely) * sides(evaluation)
    apart_N = drift_N / count_N - gate.high
    flat_N = rows.advantage_N.abs() <= advantage_radius(evaluation).likely
    return (apart_N.abs() <= lost_N) & (rows.advantage_N <= 0) | (apart_N > 0) & flat_N

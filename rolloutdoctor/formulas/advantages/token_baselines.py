"""Optimal token baselines: one baseline for every position of a group, weighted by the variance of the path so far."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.tokens import TokenScores
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.scan import reverse_scan


def optimal_token_baseline(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """``A_t = G_t - B_t`` with ``B_t = sum_g G_t W_t / (sum_g W_t + 1e-8)`` over the group's tokens at t, ``[V]``.

    ``W_t`` sums ``(1 - 2 p + sum pi^2) w^2`` up to t, p the old probability and w the rollout correction's weight.
    The position t counts masked tokens too, but the tail below is cut at a number of trained tokens: with holes in
    the mask the two do not match, upstream as here.

    Source: verl ``compute_optimal_token_baseline_advantage``.
    """
    return _advantages(scores, rule, scores.position_V, scores.in_baseline_N)


def tir_optimal_token_baseline(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """`optimal_token_baseline` with positions over trained tokens alone; rows without any are in no group, ``[V]``.

    Source: verl ``compute_multi_turn_optimal_token_baseline_advantage``.
    """
    start_V = seg.expand(scores.offsets[:-1], scores.offsets)
    rank_V = torch.arange(len(start_V), device=start_V.device) - start_V
    return _advantages(scores, rule, rank_V, scores.in_baseline_N & (scores.offsets.diff() > 0))


def _advantages(scores: TokenScores, rule: AdvantageRule, position_V: Tensor, member_N: Tensor) -> Tensor:
    groups, offsets = scores.groups, scores.offsets
    assert groups is not None
    return_V = reverse_scan(scores.reward_V, 1.0, offsets)
    # In the dtype of the evaluation: where the policy is sure of the token this cancels, and its rounding shows.
    variance_V = 1 - 2 * scores.columns["old_log_probs"].exp() + scores.columns["sum_pi_squared"]
    if "is_weights" in scores.columns:
        variance_V = variance_V * scores.columns["is_weights"] ** 2
    weight_V = _running_total(variance_V, offsets)
    weight_V = torch.where(seg.expand(member_N, offsets), weight_V, 0.0)
    # Tokens of a group at one position lie side by side once sorted by group and position.
    group_V = seg.expand(groups.index_N, offsets)
    longest = int(position_V.max()) + 1 if len(position_V) else 1
    key_V = group_V * longest + position_V
    order_V = torch.argsort(key_V, stable=True)
    _, sizes = torch.unique_consecutive(key_V[order_V], return_counts=True)
    cells = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    sorted_weight, sorted_return = weight_V[order_V], return_V[order_V]
    mean = seg.total(sorted_weight * sorted_return, cells) / (seg.total(sorted_weight, cells) + 1e-8)
    baseline_V = torch.empty_like(return_V)
    baseline_V[order_V] = seg.expand(mean, cells)

    members_N = groups.total(member_N)[groups.index_N]
    has_peers_V = seg.expand(member_N & (members_N > 1), offsets)
    if rule.zero_tail:
        has_peers_V &= position_V < seg.expand(_tail_start(member_N, scores), offsets)
    advantage_V = return_V - torch.where(has_peers_V, baseline_V, 0.0)
    if rule.singleton == "zero":
        advantage_V = torch.where(seg.expand(member_N & (members_N == 1), offsets), 0.0, advantage_V)
    return torch.where(seg.expand(member_N, offsets), advantage_V, 0.0)


def _tail_start(member_N: Tensor, scores: TokenScores) -> Tensor:
    """Return the position from which a row has no baseline, ``[N]`` int64.

    That is the second largest number of trained tokens for the only longest row of a group of two or more, and never
    for every other row.
    """
    groups = scores.groups
    assert groups is not None
    length_N = torch.where(member_N, scores.offsets.diff(), -1).double()
    most_G = seg.high(length_N[groups.order_N], groups.offsets)
    is_longest_N = member_N & (length_N == most_G[groups.index_N])
    only_N = is_longest_N & (groups.total(is_longest_N)[groups.index_N] == 1)
    rest_N = torch.where(is_longest_N, -1.0, length_N)
    second_N = seg.high(rest_N[groups.order_N], groups.offsets)[groups.index_N]
    never = torch.iinfo(torch.int64).max
    return torch.where(only_N & (second_N >= 0), second_N.long(), never)


def _running_total(x_V: Tensor, offsets: Tensor) -> Tensor:
    """Sum from the start of the row up to each token, ``[V]`` float64."""
    backwards = reverse_scan(x_V.flip(0), 1.0, len(x_V) - offsets.flip(0))
    return backwards.flip(0)

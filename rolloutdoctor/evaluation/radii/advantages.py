"""Radii of scores and advantages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.evaluation.drawn_rows import as_estimated
from rolloutdoctor.evaluation.evaluate import Evaluation, compared_groups, evaluate_rows
from rolloutdoctor.evaluation.radii.remembered import remembered_by_row
from rolloutdoctor.evaluation.radii.terms import kl_terms
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.evaluation.rows import token_levels
from rolloutdoctor.evaluation.scores import named_scores, reward_kl_tokens, token_scores, whitening_population
from rolloutdoctor.formulas.advantages.leave_one_out import std_of_others
from rolloutdoctor.formulas.advantages.levels import alone, normalised
from rolloutdoctor.formulas.advantages.table import TOKEN_ESTIMATORS
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.ops.unit_roundoff import SINGLE


def score_radius(evaluation: Evaluation) -> Radius:
    """Radius of the score of each row before it is stored, ``[N]``: of sums of token rewards and of a KL penalty."""
    batch, rows = evaluation.batch, evaluation.rows
    assert rows is not None
    radius = Radius.of(torch.zeros_like(rows.score_N))
    rule, length_N = evaluation.objective.advantage, batch.rows.diff().double()
    if rule.sums_tokens and "token_rewards" in batch.per_token:
        radius = radius + rounding.total(seg.total(batch.column("token_rewards").abs(), batch.rows), length_N)
    if rule.length_term is not None:
        radius = radius + _of_length_term(evaluation)
    term = evaluation.objective.kl_reward
    if term is None or term.coef == 0 or not rule.sums_tokens:
        return radius
    kl_T = reward_kl_tokens(batch, evaluation.objective, evaluation.dtype)
    assert kl_T is not None
    size_N = seg.total(kl_T.abs(), batch.rows)
    return radius + kl_terms(evaluation, term, size_N, length_N) * abs(term.coef)


def _of_length_term(evaluation: Evaluation) -> Radius:
    """Radius of what lengths make of the rewards, ``[N]``: of the mean of the group, and of ten operations on it."""
    rows, rule, batch = evaluation.rows, evaluation.objective.advantage, evaluation.batch
    assert rows is not None
    assert rule.length_term is not None
    stats = GroupStats(compared_groups(batch, evaluation.objective), rows.in_baseline_N)
    reward_N = torch.where(rows.in_baseline_N, batch.column("reward").double().nan_to_num(0.0), 0.0)
    size_N = stats.per_row(stats.high(reward_N.abs()).clamp(min=0))
    term = rule.length_term
    # What is lost of a span may be more than all of it.
    times = 1 + 2 * (term.output + term.input + term.turns) * size_N.clamp(min=1)
    if term.span is not None:
        times = times * (batch.rows.diff().double().max() / term.span).clamp(min=1)
    return rounding.mean(size_N * times, stats.count_N.clamp(min=1)) + rounding.stored(size_N * times) * 10


@remembered_by_row
def advantage_radius(evaluation: Evaluation) -> Radius:
    """Radius of the advantage of each row, ``[N]``; for estimators with one advantage per row.

    A score is centred among the rows that it is compared with, and multiplied by a factor (`rounding.scaled`). The
    factor is read off the result, ``A / (score - baseline)``, so that it is that of any estimator; leave-one-out has
    ``n / (n - 1)`` in it. Where the score of every row is the baseline, the factor is one over epsilon, or 2 where
    nothing is divided by a deviation. Estimators that whiten or normalise over the step do the same once more with the
    result.
    """
    rows, rule = evaluation.rows, evaluation.objective.advantage
    assert rows is not None
    assert rows.advantage_N is not None
    if rows.edited_radius is not None:
        return rows.edited_radius
    if rule.bounds is not None:
        # What lies beyond a bound may lie within it to rounding, and clamping moves nothing farther apart.
        free = evaluate_rows(evaluation.batch, _unbounded(evaluation.objective), evaluation.dtype)
        return advantage_radius(Evaluation(evaluation.batch, _unbounded(evaluation.objective), free, None))
    value_N = rows.advantage_N.nan_to_num(0.0)
    if rule.token_levels is not None or (rule.whitened and rule.row_levels is not None):
        bare = replace(evaluation.objective, advantage=replace(rule, token_levels=None, whitened=False))
        before = evaluate_rows(evaluation.batch, bare, evaluation.dtype)
        assert before is not None  # it reads no more than the evaluation did
        assert before.advantage_N is not None
        first = advantage_radius(Evaluation(evaluation.batch, bare, before, None))
        return _over_the_step(evaluation, first, before.advantage_N, value_N)
    groups, error = _compared(evaluation), score_radius(evaluation)
    again = rule.whitened or rule.normalised or rule.spec.normalised_over is not None
    # Each reward is divided by its own deviation, whatever the scale of the sum.
    scales = rule.scale != "none" or rule.spec.rewards == "every"
    divided = scales and rule.spec.divides and rule.epsilon > 0
    if again and divided:
        first, inner_N = _of_each_reward(evaluation, groups, error)
    else:
        assert rows.baseline_N is not None
        clean_N = torch.where(rows.in_baseline_N, rows.score_N, 0.0)
        inner_N = torch.where(rows.in_baseline_N, clean_N - rows.baseline_N.nan_to_num(0.0), 0.0)
        flat: float | Tensor = 1 / rule.epsilon if divided else 2.0
        if rule.spec.baseline == "score":
            flat = 0.0  # a tie at the top is one of stored values, and no mean comes in
        if rule.spec.relative:
            flat = _inverse_mean(GroupStats(groups, rows.in_baseline_N), clean_N)
        values = clean_N, inner_N, inner_N if again else value_N
        weight_N = rows.length_N if rule.spec.weighs_lengths else None
        if rule.weighs_masked:
            weight_N = evaluation.batch.rows.diff().double()
        first = _centred(groups, values, rows.in_baseline_N, flat, error, weight_N)
        if rule.one_pass and divided:
            first = first + _of_one_pass(GroupStats(groups, rows.in_baseline_N), clean_N, rule)
    return _over_the_step(evaluation, first, inner_N, value_N) if again else first


@remembered
def token_advantage_radius(evaluation: Evaluation) -> Radius:
    """Radius of the advantage of any token, one bound for all; for estimators with a time axis.

    A discounted sum has a rounding for each token that follows, and whitening one for each token of the step. What is
    added up and what is taken from it may be far larger than what is left: rewards, values and baselines count.
    """
    rows, batch = evaluation.rows, evaluation.batch
    assert rows is not None
    assert rows.advantage_T is not None
    rule = evaluation.objective.advantage
    if (rule.whitened or rule.token_levels) and batch.tokens:
        return _whitened_tokens(evaluation)
    if evaluation.objective.advantage.spec.normalised_over is not None and batch.tokens:
        return _normalised_tokens(evaluation)
    largest = torch.maximum(_largest(rows.advantage_T), _largest_term(evaluation))
    return (
        _of_group_score(evaluation)
        + rounding.total(3 * largest, _longest(evaluation))
        + rounding.mean(largest, max(batch.tokens, 1)) * 2
    )


def _of_group_score(evaluation: Evaluation) -> Radius:
    """Radius of the largest score among its group, where that is what is given to the tokens; else 0."""
    rule, objective = evaluation.objective.advantage, evaluation.objective
    estimator = rule.of_group or ("grpo" if rule.spec.at_end else None)
    if estimator is None or not len(evaluation.batch):
        return Radius.of(torch.zeros((), dtype=torch.float64, device=evaluation.batch.device))
    inner_rule = replace(rule, estimator=estimator, bounds=rule.score_bounds, whitened=False, token_levels=None)
    if rule.spec.at_end:
        inner_rule = replace(inner_rule, sums_tokens=False, masked_end="counts")
    inner = replace(objective, advantage=inner_rule, kl_reward=None)
    radius = advantage_radius(
        Evaluation(evaluation.batch, inner, evaluate_rows(evaluation.batch, inner, evaluation.dtype), None)
    )
    return Radius(radius.largest.max(), radius.likely.max())


def _unbounded(objective: Objective) -> Objective:
    return replace(objective, advantage=replace(objective.advantage, bounds=None))


def _largest_term(evaluation: Evaluation) -> Tensor:
    """The largest absolute score, value or logged baseline."""
    rows, batch = evaluation.rows, evaluation.batch
    assert rows is not None
    read = evaluation.objective.advantage.spec.columns & {"values", "reward_baseline"}
    terms = [rows.score_N, *(batch.column(name).double() for name in sorted(read))]
    return torch.stack([_largest(x) for x in terms]).max()


def _largest(x_T: Tensor) -> Tensor:
    size_T = x_T.abs().nan_to_num(0.0)
    return size_T.max() if len(size_T) else size_T.new_zeros(())


def _longest(evaluation: Evaluation) -> float:
    return float(evaluation.batch.rows.diff().max()) if len(evaluation.batch) else 1.0


def _normalised_tokens(evaluation: Evaluation) -> Radius:
    """Radius of any trained token's advantage where the estimator itself whitens those of the step."""
    rows, batch, rule = evaluation.rows, evaluation.batch, evaluation.objective.advantage
    assert rows is not None
    assert rows.advantage_T is not None
    estimated = as_estimated(batch, rule)
    scores = token_scores(estimated, evaluation.objective, rows.in_baseline_N, rows.weight_T, evaluation.dtype)
    before_V = TOKEN_ESTIMATORS[rule.estimator].returns(scores, rule)
    if "values" in rule.spec.columns:
        before_V = before_V - scores.columns["values"].double()
    error = rounding.total(3 * torch.maximum(_largest(before_V), _largest_term(evaluation)), _longest(evaluation))
    return _whitened(before_V, rows.advantage_T[batch.column("response_mask")], error)


def _whitened(before_V: Tensor, value_V: Tensor, error: Radius) -> Radius:
    """`rounding.scaled` of whitened values, for the largest of them; `error` is the radius of those before."""
    centred_V = before_V - before_V.mean()
    factor = (centred_V.square().mean() + 1e-8).rsqrt()
    # Over a rank or with padding the deviation is another.
    steepest = torch.maximum(factor, (_largest(value_V) / _largest(centred_V)).nan_to_num(0.0, 0.0))
    return rounding.scaled(_largest(before_V), float(len(before_V)), steepest, _largest(value_V), error=error)


def _parts(evaluation: Evaluation, before_V: Tensor) -> list[Tensor]:
    """The trained tokens that share the moments of a whitening: one selection, ``[V]`` bool, for each part."""
    rule = evaluation.objective.advantage
    over = whitening_population(evaluation.batch, rule) if rule.whitened_over == "context-slice" else None
    if over is None or over.part is None:
        return [torch.ones_like(before_V, dtype=torch.bool)]
    part_V = over.part
    if rule.spec.axis is Axis.ALL_TOKENS:
        part_V = part_V[evaluation.batch.column("response_mask")]
    return [part_V == part for part in torch.unique(part_V)]


def _whitened_tokens(evaluation: Evaluation) -> Radius:
    """Radius of any trained token's advantage where slime whitens those of the step."""
    rows, batch, objective = evaluation.rows, evaluation.batch, evaluation.objective
    assert rows is not None
    assert rows.advantage_T is not None
    bare = replace(objective, advantage=replace(objective.advantage, whitened=False, token_levels=None))
    before = evaluate_rows(batch, bare, evaluation.dtype)
    assert before is not None  # it reads no more than the evaluation did
    assert before.advantage_T is not None
    mask_T = batch.column("response_mask")
    before_V, value_V = before.advantage_T[mask_T], rows.advantage_T[mask_T]
    error = _of_group_score(evaluation) + rounding.total(3 * _largest(before_V), _longest(evaluation))
    if objective.advantage.token_levels is not None:
        steepest = (1 / token_levels(batch, before_V, objective.advantage).divisor).max()
        return rounding.scaled(_largest(before_V), float(len(before_V)), steepest, _largest(value_V), error=error)
    if objective.advantage.centres_only:
        return error + rounding.mean(_largest(before_V), max(len(before_V), 1)) * 2
    parts = _parts(evaluation, before_V)
    radius = _largest_of([_whitened(before_V[part], value_V[part], error) for part in parts])
    if objective.advantage.variance_floor or objective.advantage.whitening_epsilon is not None:
        return radius
    lost = [_of_difference(before_V[part], torch.ones_like(before_V[part]), _largest(value_V)) for part in parts]
    return radius + _largest_of(lost)


def _largest_of(radii: Sequence[Radius]) -> Radius:
    largest, likely = ([getattr(radius, name).max() for radius in radii] for name in ("largest", "likely"))
    return Radius(torch.stack(largest).max(), torch.stack(likely).max())


def _of_difference(before: Tensor, weight: Tensor, size: Tensor) -> Radius:
    """Bound the error of whitened values that comes from slime's variance as ``E[x^2] - E[x]^2``.

    That loses ``d = n u (m^2 + v) / v`` of it. The factor ``v^(-1/2)`` then is off by ``(1 - d)^(-1/2) - 1`` of itself,
    and by anything from d = 1 on: there the trainer's own result is rounding, or NaN.

    Args:
        before: values before they were whitened, ``[n]`` float64.
        weight: how many trained tokens have each, ``[n]``.
        size: absolute whitened values.
    """
    count = weight.sum().clamp(min=1)
    value = torch.where(weight > 0, before, 0.0)
    mean = (weight * value).sum() / count
    variance = (weight * (value - mean).square()).sum() / count + 1e-8
    share = rounding.total((mean.square() + variance) / variance, float(count))
    return Radius(*(torch.where(d < 1, size * _of_root(d), torch.inf) for d in (share.largest, share.likely)))


def _of_one_pass(stats: GroupStats, score_N: Tensor, rule: AdvantageRule) -> Radius:
    """Bound the error of scores whose variance is ``(E[x^2] - E[x]^2) n / (n - 1)``, ``[N]``.

    The deviation is off by what `_of_root` says of the error of the variance over the variance. From 1 on it is
    rounding, 0 included, and the score is anything up to `Undecided.largest_N`. Where no sum rounds, the error is 0.

    Args:
        stats: the rows that are compared.
        score_N: scores, ``[N]``.
        rule: how they were made; where its statistics are float32, too, the error counts twice.
    """
    parts = _one_pass_parts(stats, score_N, rule)
    size_N = parts.centred_N / (parts.std_N + rule.epsilon) * (2 if rule.single else 1)

    def bound(lost_N: Tensor) -> Tensor:
        share_N = lost_N / parts.std_N.square()
        # Advantages of one sign are no farther apart than the larger one; divided by a deviation of 0 it may be any.
        apart_N = torch.maximum(parts.largest(lost_N, rule.epsilon), size_N)
        return torch.where(parts.is_exact_N, 0.0, torch.where(share_N < 1, size_N * _of_root(share_N), apart_N))

    return Radius(bound(parts.lost.largest), bound(parts.lost.likely))


class Undecided(NamedTuple):
    """What rows may get whose standard deviation is 0, and in one float32 pass a rounding error or 0, ``[N]`` each.

    Attributes:
        exact_N: absolute advantage where the deviation comes out as 0: it is not divided.
        least_N: absolute advantage where it comes out as the largest rounding error.
        largest_N: absolute advantage where it comes out as the smallest one; the three are equal where no sum rounds.
    """

    exact_N: Tensor
    least_N: Tensor
    largest_N: Tensor


def one_pass_range(stats: GroupStats, score_N: Tensor, rule: AdvantageRule) -> Undecided:
    """Absolute advantages between which the order of float32 additions decides, where siblings are equal, ``[N]``.

    Squares, their mean, the square of the mean (whose sum may cancel) and the difference round ``3 (n + 2) u E[x^2]``
    together. What is left is a multiple of the spacing of float32 below ``E[x^2]``, the smallest that two means can be
    apart.

    Args:
        stats: the rows that are compared.
        score_N: scores, ``[N]``.
        rule: how they were made.
    """
    parts = _one_pass_parts(stats, score_N, rule)
    lost_N = parts.lost.largest
    least_N = parts.centred_N / (lost_N.sqrt() + rule.epsilon)
    largest_N = parts.largest(lost_N, rule.epsilon)
    stays_N = parts.is_exact_N if rule.one_pass else torch.ones_like(parts.is_exact_N)
    return Undecided(parts.centred_N, *(torch.where(stays_N, parts.centred_N, x_N) for x_N in (least_N, largest_N)))


class _OnePass(NamedTuple):
    """Parts of a variance in one pass, ``[N]`` each.

    Attributes:
        centred_N: absolute centred scores.
        std_N: exact deviation.
        square_N: mean of the squares.
        correction_N: ``n / (n - 1)``.
        lost: radius of the variance.
        is_exact_N: no sum rounds.
    """

    centred_N: Tensor
    std_N: Tensor
    square_N: Tensor
    correction_N: Tensor
    lost: Radius
    is_exact_N: Tensor

    def largest(self, lost_N: Tensor, epsilon: float) -> Tensor:
        """Largest absolute score, where the variance is anything within its radius: the smallest deviation divides."""
        _, exponent_N = torch.frexp((self.square_N - lost_N).clamp(min=0))
        # Two roundings of a mean, and those of the root and the quotient.
        spacing_N = torch.ldexp(self.correction_N, exponent_N - 24)
        size_N = self.centred_N / (spacing_N.sqrt() + epsilon)
        return size_N * (1 + 8 * SINGLE)


def _one_pass_parts(stats: GroupStats, score_N: Tensor, rule: AdvantageRule) -> _OnePass:
    groups, votes_N, others = stats.groups, stats.in_baseline_N, rule.spec.of_others
    count_N = stats.count_N - int(others)
    sum_N, squares_N = (
        stats.per_row(stats.total(x_N)) - (x_N if others else 0.0) for x_N in (score_N, score_N.square())
    )
    mean_N = sum_N / count_N.clamp(min=1)
    std_N = std_of_others(score_N, votes_N, groups) if others else stats.per_row(stats.std(score_N)).nan_to_num(0.0)
    square_N = torch.maximum(squares_N / count_N.clamp(min=1), mean_N.square())
    exact_G = _sums_are_exact(stats, score_N, None) & _sums_are_exact(stats, score_N.float().square().double(), None)
    correction_N = count_N / (count_N - 1).clamp(min=1)
    return _OnePass(
        centred_N=(score_N - mean_N).abs(),
        std_N=std_N,
        square_N=square_N,
        correction_N=correction_N,
        lost=rounding.total(3 * square_N, count_N + 2) * correction_N,
        # Where the scores are equal and no sum of them or of their squares rounds, the difference is exactly 0.
        is_exact_N=(stats.per_row(exact_G) & (std_N == 0)) | (count_N < 2),
    )


def _of_root(share: Tensor) -> Tensor:
    """Bound the relative error of ``v^(-1/2)``, where the relative error of v is below 1."""
    return (1 - share).clamp(min=1e-300).rsqrt() - 1


def _over_the_step(evaluation: Evaluation, first: Radius, inner_N: Tensor, value_N: Tensor) -> Radius:
    """Radius of advantages that were normalised over rows or tokens of the step, given that of what was normalised."""
    rows, rule = evaluation.rows, evaluation.objective.advantage
    assert rows is not None
    by_token = rows.length_N is not None and not rule.normalised and rule.spec.normalised_over != "rows"
    weight_N = rows.length_N if by_token and rows.length_N is not None else torch.ones_like(inner_N)
    count = float(weight_N.sum())
    spread, steepest = inner_N.std(correction=0), value_N.std(correction=0)
    factor = torch.where(spread > 0, steepest / spread, 1 / max(rule.epsilon, 1e-8)).clamp(min=1e-300)
    size = inner_N.abs().max() if len(inner_N) else spread
    worst = Radius(first.largest.max(), first.likely.max())
    if rule.token_levels is not None and rows.length_N is not None:
        groups = compared_groups(evaluation.batch, evaluation.objective)
        scaling = normalised(inner_N, rows.length_N, groups.index_N, alone(groups), rule.token_levels)
        return rounding.scaled(size, count, (1 / scaling.divisor).max(), value_N, error=worst)
    radius = rounding.scaled(size, count, factor, value_N, error=worst)
    if not rule.whitened or rule.variance_floor or rule.whitening_epsilon is not None:
        return radius
    return radius + _of_difference(inner_N, weight_N, value_N.abs())


def _compared(evaluation: Evaluation) -> Groups:
    """The rows that are compared with each other: groups, or all rows of the step where a scale is over the batch."""
    groups = evaluation.batch.groups
    assert groups is not None  # estimators with one advantage per row ask for group_id
    if evaluation.objective.advantage.scale == "batch":
        return Groups.of(torch.zeros_like(groups.index_N))
    return compared_groups(evaluation.batch, evaluation.objective)


def _centred(
    groups: Groups,
    values: tuple[Tensor, Tensor, Tensor],
    in_baseline_N: Tensor,
    flat: "float | Tensor",
    error: Radius,
    weight_N: Tensor | None = None,
) -> Radius:
    """`rounding.scaled` of every row, with the largest score, the count and the steepest factor of its group.

    Args:
        groups: rows that are compared with each other.
        values: scores, centred scores and results, ``[N]`` each.
        in_baseline_N: ``[N]`` bool, rows that enter the mean.
        flat: the factor of a group whose scores are all equal, or of each, ``[G]``.
        error: radius of the scores, ``[N]``.
        weight_N: whole numbers that the mean is weighted with, ``[N]``; None: it is not.
    """
    score_N, centred_N, value_N = values
    stats = GroupStats(groups, in_baseline_N)
    factor_N = torch.where(centred_N != 0, (value_N / centred_N).abs(), 0.0).nan_to_num(0.0, 0.0, 0.0)
    steepest_G = GroupStats(groups, factor_N > 0).high(factor_N)
    steepest_G = torch.where(steepest_G > 0, steepest_G, torch.where(stats.count_G > 1, flat, 1.0))
    if isinstance(flat, Tensor):
        steepest_G = torch.maximum(steepest_G, flat)
    exact_G = _sums_are_exact(stats, score_N, weight_N)
    count_G = torch.where(exact_G, 0.0, stats.count_G.clamp(min=1))
    size_G = torch.where(exact_G & (stats.spread(score_N) == 0), 0.0, stats.high(score_N.abs()).clamp(min=0))
    size_N, count_N, factor_N = (stats.per_row(x_G) for x_G in (size_G, count_G, steepest_G))
    worst = Radius(*(stats.per_row(stats.high(x_N).clamp(min=0)) for x_N in (error.largest, error.likely)))
    return rounding.scaled(size_N, count_N, factor_N, value_N, error=worst)


def _inverse_mean(stats: GroupStats, score_N: Tensor) -> Tensor:
    """One over the mean of each group, ``[G]``; infinite where that is 0 to rounding, and its sign so undecided."""
    mean_G, size_G = stats.mean(score_N).abs(), stats.high(score_N.abs()).clamp(min=0)
    is_open_G = (size_G > 0) & (mean_G <= rounding.total(size_G, stats.count_G).likely)
    return torch.where(is_open_G, torch.inf, torch.where(size_G > 0, 1 / mean_G, 0.0))


def _sums_are_exact(stats: GroupStats, score_N: Tensor, weight_N: Tensor | None) -> Tensor:
    """Groups whose sums float32 makes without rounding, in any order, ``[G]`` bool; 0/1 rewards are the common case.

    Where all scores are multiples of a power of two q and ``n max |s| / q <= 2^24``, every partial sum is one that
    float32 holds. The mean of equal scores then is that score, and no residue is left. Of a weighted sum, n is the sum
    of the weights.
    """
    digits_N, exponent_N = torch.frexp(score_N)
    whole_N = (digits_N * 2.0**24).long()
    is_single_N = whole_N.double() == digits_N * 2.0**24
    lowest_N = torch.ldexp((whole_N & -whole_N).double(), exponent_N - 24)
    step_G = stats.low(torch.where(whole_N == 0, torch.inf, lowest_N))
    terms_G = stats.count_G if weight_N is None else stats.total(weight_N)
    fits_G = terms_G * stats.high(score_N.abs()) <= 2.0**24 * step_G
    return fits_G & (stats.total((~is_single_N).double()) == 0)


def _of_each_reward(evaluation: Evaluation, groups: Groups, error: Radius) -> tuple[Radius, Tensor]:
    """Radius and value of the weighted sum of rewards that were normalised one by one: without names, of the score."""
    rows, rule = evaluation.rows, evaluation.objective.advantage
    assert rows is not None
    named = named_scores(evaluation.batch, evaluation.objective, evaluation.dtype)
    parts = list(named.values()) or [rows.score_N]
    weights = rule.reward_weights or (1.0,) * len(parts)
    radius, sum_N = Radius.of(torch.zeros_like(rows.score_N)), torch.zeros_like(rows.score_N)
    if rule.one_pass or rule.spec.of_others:
        parts = [named[name] for name in sorted(named)]
    for weight, part_N in zip(weights, parts, strict=False):
        has_N = rows.in_baseline_N & ~part_N.isnan()
        clean_N = torch.where(has_N, part_N, 0.0)
        stats = GroupStats(groups, has_N)
        centred_N = torch.where(has_N, clean_N - stats.per_row(stats.mean(clean_N)).nan_to_num(0.0), 0.0)
        std_N = stats.per_row(stats.std(clean_N)).nan_to_num(0.0)
        if rule.spec.of_others:
            centred_N = centred_N * stats.count_N / (stats.count_N - 1).clamp(min=1)
            std_N = std_of_others(clean_N, has_N, groups)
        value_N = torch.where(
            (std_N > 0) | (not rule.one_pass and not rule.spec.of_others), centred_N / (std_N + rule.epsilon), centred_N
        )
        radius = radius + _centred(groups, (clean_N, centred_N, value_N), has_N, 1 / rule.epsilon, error) * abs(weight)
        if rule.one_pass:
            radius = radius + _of_one_pass(stats, clean_N, rule) * abs(weight)
        sum_N = sum_N + weight * value_N
    return radius + rounding.stored(sum_N) * len(parts), sum_N

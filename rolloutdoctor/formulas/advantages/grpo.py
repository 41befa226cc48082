"""Group-relative advantages: GRPO with its scales, GPG, pass@k, and REINFORCE++ with a group baseline."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.normalised import over_batch
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, singleton_advantage
from rolloutdoctor.formulas.advantages.whitening import whiten
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.results.errors import TRAINER, CannotComputeError


def grpo(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = (s_i - mean_g) / (std_g + epsilon)``, the standard deviation unbiased.

    `rule.scale` takes the standard deviation over the group, over the batch, or leaves the division out. A single
    baseline row of a group gets its raw score (verl, whose statistics fall back to mean 0 and std 1) or zero (TRL,
    slime). With the scale "mean" the divisor is the group's mean (SkyRL ``compute_maxrl_advantage``).
    `rule.normalised` divides by the standard deviation of the batch's centred scores instead.

    Source: Shao et al. 2024, arXiv 2402.03300; verl ``compute_grpo_outcome_advantage`` and
    ``compute_grpo_vectorized_outcome_advantage``; TRL ``GRPOTrainer._generate_and_score_completions``;
    ms-swift ``compute_advantages``.
    """
    mean_N = scores.mean_N()
    centred_N = scores.of_baseline_rows(scores.score_N - mean_N)
    raw = singleton_advantage(scores, Advantages(centred_N, mean_N), rule.singleton)
    if rule.normalised:
        return raw._replace(value_N=over_batch(raw.value_N, scores.in_baseline_N, rule.epsilon, scores.whole))
    return Advantages(raw.value_N / divisors(scores, rule), raw.baseline_N)


def divisors(scores: Scores, rule: AdvantageRule) -> Tensor:
    """Return what centred scores are divided by, as `rule.scale` says, ``[N]`` float64."""
    if rule.scale == "group":
        # A single row has no standard deviation; verl divides its raw score by 1 + epsilon.
        scale_N = torch.where(scores.baseline_rows_N > 1, _scale(scores.std_N(), scores.baseline_rows_N, rule), 1.0)
        return torch.where(scores.baseline_rows_N > 1, scale_N, scale_N + rule.epsilon)
    if rule.scale == "batch":
        stats = GroupStats(scores.whole, scores.in_baseline_N)
        std_B = torch.where(stats.count_G > 1, stats.std(scores.score_N), 0.0)
        return stats.per_row(_scale(std_B, stats.count_G, rule))
    if rule.scale == "mean":
        return torch.where(scores.baseline_rows_N > 1, scores.mean_N() + rule.epsilon, 1.0)
    return torch.ones_like(scores.score_N)


def _scale(std: Tensor, count: Tensor, rule: AdvantageRule) -> Tensor:
    """Return the divisor of centred scores, given the unbiased standard deviation of `count` scores."""
    if rule.biased_std:
        std = std * ((count - 1).clamp(min=0) / count.clamp(min=1)).sqrt()
    return (std.square() + rule.epsilon).sqrt() if rule.epsilon_in_root else std + rule.epsilon


def raw(scores: Scores, rule: AdvantageRule) -> Advantages:
    """The score itself. Source: slime without ``rewards_normalization``."""
    return Advantages(scores.of_baseline_rows(scores.score_N), torch.zeros_like(scores.score_N))


def gpg(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = alpha (s_i - mean_g)`` with ``alpha = baseline rows / max(those with a nonzero score, 1)``.

    Rows outside the baseline count neither in the mean of the group nor in the batch-wide factor.

    Source: arXiv 2504.02546; verl ``compute_gpg_outcome_advantage`` (f_norm = 1).
    """
    mean_N = scores.mean_N()
    advantages = singleton_advantage(
        scores, Advantages(scores.of_baseline_rows(scores.score_N - mean_N), mean_N), rule.singleton
    )
    nonzero = (scores.in_baseline_N & (scores.score_N != 0)).sum().clamp(min=1)
    alpha = scores.in_baseline_N.sum().double() / nonzero
    return Advantages(advantages.value_N * alpha, advantages.baseline_N)


def grpo_passk(scores: Scores, rule: AdvantageRule) -> Advantages:
    """Best minus second best of the group for the best row, 0 for every other; divided by the group's std.

    Source: arXiv 2503.19595; verl ``compute_grpo_passk_outcome_advantage``. verl raises for a group of one; where
    fewer than two baseline rows are left, the group gets 0, as proposed upstream.

    Raises:
        CannotComputeError: if a group has a single row, where verl itself fails.
    """
    groups = scores.groups
    if bool((groups.size_G < 2).any()):
        raise CannotComputeError(
            f"grpo_passk needs at least two rows in every group, and {TRAINER} fails on a group of one"
        )
    masked_N = torch.where(scores.in_baseline_N, scores.score_N, -torch.inf)
    best_G = seg.high(masked_N[groups.order_N], groups.offsets)
    is_best_N = scores.in_baseline_N & (masked_N == best_G[groups.index_N])
    # With a tie at the top the second best is the best, and the whole group gets 0.
    tied_G = groups.total(is_best_N) > 1
    rest_N = torch.where(is_best_N, -torch.inf, masked_N)
    second_G = torch.where(tied_G, best_G, seg.high(rest_N[groups.order_N], groups.offsets))
    second_N = second_G[groups.index_N]
    scale_N = scores.std_N() + rule.epsilon if rule.scale == "group" else torch.ones_like(scores.score_N)
    active_N = is_best_N & (scores.baseline_rows_N > 1)
    return Advantages(
        torch.where(active_N, (scores.score_N - second_N) / scale_N, 0.0),
        torch.where(active_N, second_N, scores.score_N),
    )


def reinforce_plus_plus_baseline(scores: Scores, rule: AdvantageRule) -> Advantages:
    """Scores centred by group, then whitened over the trained tokens of the step.

    A row counts once for each of its tokens: ``A = (b - m) / sqrt(v + 1e-8)`` with m and v the token-weighted mean
    and unbiased variance of b.

    Source: arXiv 2501.03262; verl ``compute_reinforce_plus_plus_baseline_outcome_advantage``.

    Raises:
        CannotComputeError: if the step has fewer than two trained tokens, where verl's whitening fails.
    """
    mean_N = scores.mean_N()
    advantages = singleton_advantage(
        scores, Advantages(scores.of_baseline_rows(scores.score_N - mean_N), mean_N), rule.singleton
    )
    return Advantages(whiten(advantages.value_N, scores.length_N, scores.population), advantages.baseline_N)

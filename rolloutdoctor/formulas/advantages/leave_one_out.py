"""RLOO: the baseline of a row is the mean of its siblings, and so may the standard deviation be theirs."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.grpo import divisors
from rolloutdoctor.formulas.advantages.normalised import over_batch
from rolloutdoctor.formulas.advantages.scores import Advantages, Scores, singleton_advantage
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups


def rloo(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = s_i - mean of the other baseline rows = n / (n - 1) (s_i - mean_g)``.

    Source: Ahmadian et al. 2024, arXiv 2402.14740; verl ``compute_rloo_outcome_advantage``, where a single row of
    a group keeps its raw score, and ``compute_rloo_vectorized_outcome_advantage``, where it gets 0; TRL
    ``RLOOTrainer``, where it gets 0 and has no part in the normalisation over the batch.
    """
    baseline_rows_N = scores.baseline_rows_N
    factor_N = torch.where(baseline_rows_N > 1, baseline_rows_N / (baseline_rows_N - 1), 0.0)
    value_N = scores.of_baseline_rows(factor_N * (scores.score_N - scores.mean_N()))
    advantages = singleton_advantage(scores, Advantages(value_N, scores.score_N - value_N), rule.singleton)
    if not rule.normalised:
        return advantages
    able_N = scores.in_baseline_N & (baseline_rows_N > 1)
    return advantages._replace(value_N=over_batch(advantages.value_N, able_N, rule.epsilon, scores.whole))


def rloo_scaled(scores: Scores, rule: AdvantageRule) -> Advantages:
    """`rloo`, divided by the standard deviation of the group or of the batch plus epsilon, as `rule.scale` says.

    Source: ms-swift ``compute_advantages`` (swift/rl_core/advantage.py).
    """
    advantages = rloo(scores, rule)
    return advantages._replace(
        value_N=advantages.value_N / divisors(scores, rule), baseline_N=scores.of_baseline_rows(advantages.baseline_N)
    )


def leave_one_out_score(scores: Scores, rule: AdvantageRule) -> Advantages:
    r"""``A_i = (s_i - b_i) / (std_i + epsilon)``, both over the *other* baseline rows; where std_i is 0, ``s_i - b_i``.

    Below three baseline rows nothing is divided. This is the exact one: upstream takes the variance in one float32
    pass, so that for equal siblings it is 0 or rounding, and ``[1, 0.3, ... 0.3]`` gives 0.7 or up to 7428, by the
    order of the additions (`float32.one_pass_scores`).

    Source: NeMo-RL ``calculate_baseline_and_std_per_prompt``, ``GRPOAdvantageEstimator``.
    """
    advantages = rloo(scores, rule)
    if rule.scale == "none":
        return advantages
    std_N = std_of_others(scores.score_N, scores.in_baseline_N, scores.groups)
    return advantages._replace(
        value_N=torch.where(std_N > 0, advantages.value_N / (std_N + rule.epsilon), advantages.value_N)
    )


def std_of_others(score_N: Tensor, in_baseline_N: Tensor, groups: Groups) -> Tensor:
    """Unbiased standard deviation of the other baseline rows of each row's group, float64 ``[N]``; 0 below two.

    It is exactly 0 where they are equal: sums over those below and those above in order, of differences from the
    median, leave nothing to cancel.
    """
    std_N = torch.zeros_like(score_N, dtype=torch.float64)
    baseline_B = in_baseline_N.nonzero().squeeze(1)
    voting = Groups.of(groups.index_N[baseline_B], len(groups))
    for size in voting.sizes:
        if size < 3:
            continue
        first_k = voting.offsets[:-1][voting.size_G == size]
        places = baseline_B[voting.order_N[first_k[:, None] + torch.arange(size, device=first_k.device)]]
        value, order = score_N[places].double().sort(1)
        gap = value - value[:, size // 2, None]
        sum_, squares = (_of_others(x) for x in (gap, gap.square()))
        variance = (squares - sum_.square() / (size - 1)) / (size - 2)
        # Equal siblings may differ from the median, which then is the row itself.
        lowest = torch.cat([value[:, 1:2], value[:, :1].expand(-1, size - 1)], 1)
        highest = torch.cat([value[:, -1:].expand(-1, size - 1), value[:, -2:-1]], 1)
        std_N[places.gather(1, order)] = torch.where(highest > lowest, variance.clamp(min=0).sqrt(), 0.0)
    return std_N


def equal_siblings(score_N: Tensor, in_baseline_N: Tensor, groups: Groups) -> Tensor:
    """Baseline rows whose two or more siblings have equal scores, ``[N]`` bool."""
    stats = GroupStats(groups, in_baseline_N)
    return in_baseline_N & (stats.count_N > 2) & (std_of_others(score_N, in_baseline_N, groups) == 0)


def _of_others(x: Tensor) -> Tensor:
    """Sum over axis 1 without each value itself."""
    before = x.cumsum(1).roll(1, 1)
    after = x.flip(1).cumsum(1).roll(1, 1)
    before[:, 0] = after[:, 0] = 0.0
    return before + after.flip(1)

"""Estimators over all response tokens, masked ones included, on token rewards that carry the KL penalty.

`rolloutdoctor.formulas.advantages.tokens` has those over the trained tokens alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.grpo import grpo
from rolloutdoctor.formulas.advantages.leave_one_out import rloo
from rolloutdoctor.formulas.advantages.levels import level_scores
from rolloutdoctor.formulas.advantages.scores import Scores
from rolloutdoctor.formulas.advantages.tokens import generalised
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.scan import reverse_scan
from rolloutdoctor.results.errors import TRAINER, CannotComputeError


@dataclass(frozen=True, eq=False)
class ResponseScores:
    """The response tokens of a step.

    Attributes:
        score_N: ``[N]`` float64 score of each row, without the penalty.
        penalty_T: ``[T]`` float64 KL penalty of each token, coefficient included; None without any.
        mask_T: ``[T]`` bool, trained tokens.
        offsets: ``[N+1]`` int64 row offsets.
        row_scores: the scores with their groups; None for estimators without groups.
        columns: further columns by canonical name, ``[T]``.
        reward_T: ``[T]`` float64 reward of each token, without the penalty; None: the score is at the last one.
    """

    score_N: Tensor
    penalty_T: Tensor | None
    mask_T: Tensor
    offsets: Tensor
    row_scores: Scores | None
    columns: Mapping[str, Tensor]
    reward_T: Tensor | None = None


def response_returns(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` over all tokens of a response, masked ones included, ``[T]`` float64.

    The score goes to the last token, whatever its mask. Source: SkyRL
    ``compute_reinforce_plus_plus_outcome_advantage``.
    """
    return reverse_scan(_rewards(scores), rule.gamma, scores.offsets)


def _rewards(scores: ResponseScores) -> Tensor:
    """Reward of each token, less its penalty, ``[T]`` float64."""
    if scores.reward_T is None:
        return token_rewards(scores.score_N, scores.penalty_T, scores.offsets)
    return scores.reward_T if scores.penalty_T is None else scores.reward_T - scores.penalty_T


def token_rewards(score_N: Tensor, penalty_T: Tensor | None, offsets: Tensor) -> Tensor:
    """Minus the penalty, with the score added to the last response token, whatever its mask, ``[T]`` float64.

    This is also what slime's stored KL holds when the metric buffer is the reward buffer. A row without a token has
    no place for its score. Source: slime ``compute_advantages_and_returns``, estimator ppo.

    Args:
        score_N: ``[N]`` float64 score of each row.
        penalty_T: ``[T]`` float64 KL penalty, coefficient included; None without any.
        offsets: ``[N+1]`` int64 row offsets.
    """
    rewards_T = torch.zeros(int(offsets[-1]), dtype=torch.float64, device=offsets.device)
    if penalty_T is not None:
        rewards_T -= penalty_T
    filled_N = offsets.diff() > 0
    rewards_T.index_add_(0, offsets[1:][filled_N] - 1, score_N[filled_N])
    return rewards_T


def gae(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, ``[T]`` float64.

    No mask enters, and values beyond the end of a row are 0. Source: slime ``vanilla_gae``; SkyRL
    ``compute_gae_advantage_return``.

    Raises:
        CannotComputeError: if a row has no token, where slime has no last one to add the reward to.
    """
    offsets, empty = scores.offsets, int((scores.offsets.diff() == 0).sum())
    if empty:
        raise CannotComputeError(
            f"ppo adds the reward to the last token of a row, and {empty} rows have no token; {TRAINER} fails here "
            f"(IndexError)"
        )
    return generalised(_rewards(scores), scores.columns["values"].double(), offsets, rule)


def gae_of_trained(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """`gae` over the trained tokens alone, whose last one gets the score; 0 for masked tokens, ``[T]`` float64.

    A row without a trained token has no place for its score. Source: miles ``get_advantages_and_returns_batch``.
    """
    mask_T = scores.mask_T
    trained_N = seg.total(mask_T, scores.offsets).long()
    offsets = torch.cat([trained_N.new_zeros(1), trained_N.cumsum(0)])
    penalty_V = None if scores.penalty_T is None else scores.penalty_T[mask_T]
    reward_V = token_rewards(scores.score_N, penalty_V, offsets)
    found_T = torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    found_T[mask_T] = generalised(reward_V, scores.columns["values"][mask_T].double(), offsets, rule)
    return found_T


def discounted_token_returns(scores: ResponseScores, rule: AdvantageRule, *, everywhere: bool = False) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}`` with ``r_t = -penalty_t m_t``, ``[T]`` float64.

    The score goes to the last trained token. The discount counts masked tokens too, unlike that of
    `tokens.discounted_returns`. Source: slime ``get_reinforce_plus_plus_returns``; miles, whose masked tokens are
    penalised too (`everywhere`).

    Raises:
        CannotComputeError: if a row has no trained token, where slime's assertion fails.
    """
    mask_T, offsets = scores.mask_T, scores.offsets
    dead_N = seg.total(mask_T, offsets) == 0
    if bool(dead_N.any()):
        raise CannotComputeError(
            f"reinforce_plus_plus needs a trained token in every row, and {int(dead_N.sum())} rows have none; "
            f"{TRAINER} fails here (its assertion that a sequence is not fully masked)"
        )
    return reverse_scan(_at_last_trained(scores, scores.score_N, everywhere=everywhere), rule.gamma, offsets)


def _at_last_trained(scores: ResponseScores, score_N: Tensor, *, everywhere: bool = False) -> Tensor:
    """Score of a row at its last trained token, less the penalty of its trained tokens or of all, ``[T]`` float64.

    A row without a trained token has no place for its score.
    """
    mask_T, offsets = scores.mask_T, scores.offsets
    rewards_T = torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    if scores.penalty_T is not None:
        rewards_T = -scores.penalty_T if everywhere else torch.where(mask_T, -scores.penalty_T, rewards_T)
    place_T = torch.where(mask_T, torch.arange(len(mask_T), device=mask_T.device), -1)
    last_N, live_N = seg.high(place_T.double(), offsets), seg.total(mask_T, offsets) > 0
    return rewards_T.index_add_(0, last_N[live_N].long(), score_N[live_N])


def returns_of_scores(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}``, ``r_t = -penalty_t m_t`` and the score at the last trained token, ``[T]`` float64.

    The score is that of the row, or its score among its group, and clamped. The discount counts masked tokens.
    Source: OpenRLHF ``compute_advantages_and_returns``, ``compute_reward``, ``get_cumulative_returns``.
    """
    return reverse_scan(_at_last_trained(scores, _given(scores, rule)), rule.gamma, scores.offsets)


def _given(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """Score of each row that is given to its tokens, ``[N]`` float64."""
    score_N = scores.score_N
    if scores.row_scores is not None:
        estimator = {"rloo": rloo, "level_scores": level_scores}.get(rule.of_group or "", grpo)
        score_N = scores.row_scores.shared(estimator(scores.row_scores, rule)).value_N
    return score_N if rule.score_bounds is None else score_N.clamp(*rule.score_bounds)


def gae_of_masked(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """`gae` over all tokens, masked ones having neither reward, penalty nor value, ``[T]`` float64.

    They still are steps of the recursion. Source: OpenRLHF ``get_advantages_and_returns``.
    """
    value_T = torch.where(scores.mask_T, scores.columns["values"].double(), 0.0)
    return generalised(_at_last_trained(scores, _given(scores, rule)), value_T, scores.offsets, rule)


def penalised_group_scores(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """GRPO's advantage of the row, less the penalty of the token, ``[T]`` float64.

    Source: slime ``compute_advantages_and_returns``, estimator reinforce_plus_plus_baseline.
    """
    assert scores.row_scores is not None  # the estimator has groups
    advantage_T = seg.expand(scores.row_scores.shared(grpo(scores.row_scores, rule)).value_N, scores.offsets)
    return advantage_T if scores.penalty_T is None else advantage_T - scores.penalty_T


def group_scores_of_tokens(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """GRPO's advantage of the row, which is whitened by parts of rows then, ``[T]`` float64."""
    return penalised_group_scores(replace(scores, penalty_T=None), rule)


def scores_of_tokens(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """The reward of the row, which is whitened by parts of rows then, ``[T]`` float64."""
    return penalised_scores(replace(scores, penalty_T=None), rule)


def penalised_scores(scores: ResponseScores, rule: AdvantageRule) -> Tensor:
    """The reward of the row, less the penalty of the token, ``[T]`` float64.

    Source: NeMo-RL ``ReinforcePlusPlusAdvantageEstimator`` without ``minus_baseline``.
    """
    advantage_T = seg.expand(scores.score_N, scores.offsets)
    return advantage_T if scores.penalty_T is None else advantage_T - scores.penalty_T

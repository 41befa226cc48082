"""Estimators with a time axis: discounted returns, generalised advantages with a mask, ReMax.

They see the trained tokens alone. That masked tokens are skipped, and what lies behind them is carried over, is the
same as taking them out; a reward on a masked token is lost, as it is upstream.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.whitening import Population, whiten
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.scan import reverse_scan


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The trained tokens of a step, masked ones taken out.

    Attributes:
        reward_V: ``[V]`` float64, reward of each token, KL penalty included.
        offsets: ``[N+1]`` int64 row offsets of the trained tokens.
        position_V: ``[V]`` int64, position in the response, masked tokens counted.
        in_baseline_N: ``[N]`` bool, rows that enter baselines.
        groups: rows gathered by prompt; None for estimators without groups.
        columns: further columns by canonical name, ``[V]`` or ``[N]``, in the dtype of the evaluation.
        population: what whitening is over; None: the trained tokens.
    """

    reward_V: Tensor
    offsets: Tensor
    position_V: Tensor
    in_baseline_N: Tensor
    groups: Groups | None
    columns: Mapping[str, Tensor]
    population: Population | None = None

    @property
    def spans(self) -> Tensor:
        """Offsets of the runs of trained tokens without a masked one between them, ``[spans+1]`` int64."""
        first_V = torch.ones_like(self.position_V, dtype=torch.bool)
        first_V[1:] = self.position_V[1:] != self.position_V[:-1] + 1
        first_V[self.offsets[:-1][self.offsets.diff() > 0]] = True
        return torch.cat([first_V.nonzero()[:, 0], self.offsets[-1:]])


def masked_gae(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``, then whitened, ``[V]``.

    Source: Schulman et al. 2016, arXiv 1506.02438; verl ``compute_gae_advantage_return``, whose loop carries the next
    value and advantage over masked tokens.

    Raises:
        CannotComputeError: for fewer than two trained tokens, where verl fails.
    """
    return whiten(_of_trained(scores, rule), population=scores.population)


def _of_trained(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    return generalised(scores.reward_V, scores.columns["values"].double(), scores.offsets, rule)


def generalised(reward_T: Tensor, value_T: Tensor, offsets: Tensor, rule: AdvantageRule) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``, not whitened, ``[T]`` float64.

    Values beyond the end of a row are 0. Source: Schulman et al. 2016, arXiv 1506.02438.

    Args:
        reward_T: ``[T]`` float64 reward of each token.
        value_T: ``[T]`` float64 value of each token.
        offsets: ``[N+1]`` int64 row offsets.
        rule: the discounts.
    """
    next_T = torch.zeros_like(value_T)
    next_T[:-1] = value_T[1:]
    filled_N = offsets.diff() > 0
    next_T[offsets[1:][filled_N] - 1] = 0.0
    delta_T = reward_T + rule.gamma * next_T - value_T
    return reverse_scan(delta_T, rule.gamma * rule.lam, offsets)


def gae_returns(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """Return the targets of the critic: generalised advantages, not whitened, plus values, ``[V]``.

    Source: verl ``compute_gae_advantage_return``.
    """
    return _of_trained(scores, rule) + scores.columns["values"].double()


def reinforce_plus_plus(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """Discounted returns ``G_t = r_t + gamma G_{t+1}``, whitened over the step, ``[V]``.

    Source: arXiv 2501.03262; verl ``compute_reinforce_plus_plus_outcome_advantage``.

    Raises:
        CannotComputeError: for fewer than two trained tokens, where verl fails.
    """
    return whiten(discounted_returns(scores, rule), population=scores.population)


def discounted_returns(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """``G_t = r_t + gamma G_{t+1}``, ``[V]``; with `rule.resets_at_mask` G is 0 behind a trained span.

    Source: verl ``compute_reinforce_plus_plus_outcome_advantage``, from 0.9.0 and up to 0.8.0.
    """
    return reverse_scan(scores.reward_V, rule.gamma, scores.spans if rule.resets_at_mask else scores.offsets)


def scores_to_go(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """``A_t = r_t + gamma lam A_{t+1}``, generalised advantages without a critic, ``[V]``.

    Source: AReaL ``_compute_token_level_gae`` with values of 0.
    """
    return reverse_scan(scores.reward_V, rule.gamma * rule.lam, scores.offsets)


def remax(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """Undiscounted returns less the reward of the greedy rollout, ``[V]``.

    Source: arXiv 2310.10505; verl ``compute_remax_outcome_advantage``.
    """
    baseline_V = seg.expand(scores.columns["reward_baseline"].double(), scores.offsets)
    return rewards_to_go(scores, rule) - baseline_V


def rewards_to_go(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """Sum of the rewards from each token on, ``[V]``; no discount.

    Source: verl ``compute_remax_outcome_advantage``, ``compute_optimal_token_baseline_advantage`` and
    ``compute_multi_turn_optimal_token_baseline_advantage``.
    """
    return reverse_scan(scores.reward_V, 1.0, scores.offsets)


def as_stored(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """Return the advantages that the trainer stored, ``[V]``: of a run without rewards, or of an unknown rule."""
    return scores.columns["advantages"].double()

"""Generalised advantage estimation as slime computes it, on token rewards that carry the KL penalty."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops.scan import reverse_scan
from rolloutdoctor.results.errors import CannotComputeError


def token_rewards(batch: RolloutBatch, objective: Objective, kl_T: Tensor | None, reward_N: Tensor) -> Tensor:
    """``-coef * kl_t``, with the reward added to the last response token, whatever its mask, ``[T]`` float64.

    This is also what slime's stored KL holds when the metric buffer is the reward buffer. A row without a token has
    no place for its reward.
    Source: slime ``compute_advantages_and_returns``, estimator ppo.
    """
    coef = objective.kl_reward.coef if objective.kl_reward else 0.0
    rewards_T = torch.zeros(batch.tokens, dtype=torch.float64, device=batch.device)
    if kl_T is not None:
        rewards_T -= coef * kl_T.double()
    filled_N = batch.rows.diff() > 0
    rewards_T.index_add_(0, batch.rows[1:][filled_N] - 1, reward_N[filled_N])
    return rewards_T


def gae(batch: RolloutBatch, objective: Objective, kl_T: Tensor | None, reward_N: Tensor) -> Tensor:
    """``A_t = delta_t + gamma lam A_{t+1}`` with ``delta_t = r_t + gamma V_{t+1} - V_t``, ``[T]`` float64.

    No mask enters, and values beyond the end of a row are 0, as in slime's ``vanilla_gae``.

    Raises:
        CannotComputeError: if a row has no token, where slime has no last one to add the reward to.
    """
    rule, empty = objective.advantage, int((batch.rows.diff() == 0).sum())
    if empty:
        raise CannotComputeError(
            f"ppo adds the reward to the last token of a row, and {empty} rows have no token; slime fails here "
            f"(IndexError)"
        )
    values_T = batch.column("values").double()
    next_T = torch.zeros_like(values_T)
    next_T[:-1] = values_T[1:]
    next_T[batch.rows[1:] - 1] = 0.0
    delta_T = token_rewards(batch, objective, kl_T, reward_N) + rule.gamma * next_T - values_T
    return reverse_scan(delta_T, rule.gamma * rule.lam, batch.rows)

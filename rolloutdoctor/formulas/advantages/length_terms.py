"""Rewards that depend on how long a response is among those of its group, before any baseline."""

from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.float32 import means
from rolloutdoctor.objective.objective import LengthTerm
from rolloutdoctor.ops.group_stats import GroupStats


class Lengths(NamedTuple):
    """Lengths of the rows, ``[N]`` each, in the dtype of the rewards.

    Attributes:
        response_N: response tokens, masked ones included.
        trained_N: trained tokens, which the policy sampled.
        prompt_N: prompt tokens; None where no penalty reads them.
        turns_N: spans of trained tokens.
    """

    response_N: Tensor
    trained_N: Tensor
    prompt_N: Tensor | None
    turns_N: Tensor


def shaped(reward_N: Tensor, lengths: Lengths, stats: GroupStats, term: LengthTerm) -> Tensor:
    """Return the rewards of the baseline rows with what their lengths do to them, ``[N]`` in the dtype of `reward_N`.

    ``s / (1 + alpha L / mean L)``, L response tokens (group relative reward rescaling); or ``s - mean s * p``, p the
    length over a number of tokens, or a weighted sum of sampled tokens, input tokens and turns, each over the largest
    of the group. A gated penalty is multiplied by the reward.

    Source: prime-rl ``default_advantage_fn`` (src/prime_rl/orchestrator/advantage.py, 0.5 and 0.6) and
    ``GRPOAlgorithm.score_group`` (src/prime_rl/orchestrator/algo/grpo.py, from 0.7 on).

    Args:
        reward_N: ``[N]`` rewards, 0 for rows outside of the baseline.
        lengths: of the rows.
        stats: the baseline rows by group.
        term: which of these.
    """
    dtype = reward_N.dtype

    def mean(x_N: Tensor) -> Tensor:
        # Rewards that are equal may stay so or not, by the rounding of their mean.
        if dtype == torch.float32:
            return means(stats.only(x_N, torch.nan), stats.groups)
        return stats.per_row(stats.mean(x_N))

    def share(x_N: Tensor) -> Tensor:
        return x_N / stats.per_row(stats.high(x_N)).clamp(min=1)

    if term.rescaling is not None:
        return stats.only(reward_N * (1 + term.rescaling * (lengths.response_N / mean(lengths.response_N))) ** -1)
    if term.span is not None:
        penalty_N = term.output * mean(reward_N) * (lengths.trained_N / term.span)
        return stats.only(reward_N - (penalty_N * reward_N if term.gated else penalty_N))
    part_N = term.output * share(lengths.trained_N)
    if lengths.prompt_N is not None:
        masked_N = lengths.response_N - lengths.trained_N
        part_N = part_N + term.input * share(lengths.prompt_N + masked_N)
    part_N = part_N + term.turns * share(lengths.turns_N)
    return stats.only(reward_N - mean(reward_N) * part_N)


def spans(mask_T: Tensor, offsets: Tensor) -> Tensor:
    """Start of every span of trained tokens, ``[T]`` bool: a span ends at a masked token and at the end of its row."""
    start_T = mask_T.clone()
    start_T[1:] &= ~mask_T[:-1]
    first = offsets[:-1][offsets.diff() > 0]
    start_T[first] = mask_T[first]
    return start_T

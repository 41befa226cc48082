"""Advantages that belong to other rows of the step, which were drawn: `AdvantageRule.drawn`.

Source: verl ``compute_pf_ppo_reweight_data``, and ``PPOTrainer._compute_advantage`` of the V1 trainer, which writes the
advantages, the returns and mostly the masks of the rows that were drawn back under the keys of the rows as they were.
"""

from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.formulas.advantages.drawn_rows import of_sources, on_every_token, sources
from rolloutdoctor.formulas.advantages.tokens import TokenScores, generalised
from rolloutdoctor.formulas.advantages.whitening import whitened_zero
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.results.errors import CannotComputeError


def as_estimated(batch: RolloutBatch, rule: AdvantageRule) -> RolloutBatch:
    """Return the rows with the masks that the estimator saw: those before rows were given others."""
    if not rule.draws_masks:
        return batch
    return replace(batch, per_token={**batch.per_token, "response_mask": batch.column("response_mask_pre")})


def drawn_advantages(
    batch: RolloutBatch, scores: TokenScores, value_V: Tensor, rule: AdvantageRule
) -> tuple[Tensor, Tensor]:
    """Advantages of the rows that were drawn, ``[T]`` float64, 0 where masked; and which these are, ``[N]`` int64.

    Args:
        batch: the step, with its logged `advantages`.
        scores: its trained tokens, as the estimator saw them.
        value_V: their own advantages, whitened, ``[V]``.
        rule: how they were made.

    Raises:
        CannotComputeError: if they are whitened over other tokens: what the padding has is not known then.
    """
    if scores.population is not None:
        raise CannotComputeError("advantages of rows that were drawn are whitened over the trained tokens alone")
    mask_T, padding = batch.column("response_mask"), whitened_zero(_before(scores, rule))
    own_T = on_every_token(value_V, as_estimated(batch, rule).column("response_mask"), batch.rows, padding)
    source_N = torch.arange(len(batch), device=batch.device)
    if rule.draws_advantages:
        source_N = sources(own_T, padding, batch.column("advantages").double(), mask_T, batch.rows)
    return torch.where(mask_T, of_sources(own_T, padding, source_N, batch.rows), 0.0), source_N


def drawn_returns(batch: RolloutBatch, scores: TokenScores, value_V: Tensor, rule: AdvantageRule) -> Tensor:
    """Returns of the same rows, ``[T]`` float64: generalised advantages and values, both 0 in the padding.

    The arguments are those of `drawn_advantages`.
    """
    _, source_N = drawn_advantages(batch, scores, value_V, rule)
    own_T = on_every_token(_before(scores, rule), as_estimated(batch, rule).column("response_mask"), batch.rows, 0.0)
    return of_sources(own_T + batch.column("values").double(), 0.0, source_N, batch.rows)


def _before(scores: TokenScores, rule: AdvantageRule) -> Tensor:
    """The advantages of the trained tokens before they are whitened, ``[V]``."""
    return generalised(scores.reward_V, scores.columns["values"].double(), scores.offsets, rule)

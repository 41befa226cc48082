"""Advantages that are not finite, under every policy loss of the real verl: what becomes NaN there does so here."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from parity.test_verl_policy import AGGREGATIONS, METRICS, VARIANTS, algos, objective, upstream_policy
from proof.claims import compared

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

__all__ = ["algos"]

CASES = {
    # name: estimator, and how the batch is edited
    "nan reward": "grpo",
    "nan reward, one token": "remax",
    "infinite reward": "remax",
    "infinite reward below": "remax",
    "group without a token": "opo",
}


@cache
def batch_of(case: str) -> RolloutBatch:
    """Every row has a token; in some, some are masked."""
    batch = random_batch(11, sizes=(4, 4, 3), spread=0.5, empty=0.0, rejected=0.0, holes=0.2, dtype=torch.float64)
    first_N = batch.groups.index_N == 0
    places = first_N.nonzero().squeeze(1)
    reward_N, mask_T = batch.column("reward").clone(), batch.column("response_mask").clone()
    mask_T[batch.rows[1:] - 1] = True
    token_T = torch.zeros(batch.tokens, dtype=torch.float64)
    token_T[batch.rows[1:] - 1] = reward_N
    match case:
        case "nan reward":
            token_T[batch.rows[places[0] + 1] - 1] = torch.nan
        case "nan reward, one token":
            # Tokens behind it have the advantage of what follows them.
            token_T[batch.rows[places[0]]] = torch.nan
            mask_T[batch.rows[places[0]]] = True
        case "infinite reward":
            token_T[batch.rows[places[0] + 1] - 1] = torch.inf
        case "infinite reward below":
            token_T[batch.rows[places[0] + 1] - 1] = -torch.inf
        case "group without a token":
            mask_T &= ~torch.repeat_interleave(first_N, batch.rows.diff())
    columns = {**batch.per_token, "response_mask": mask_T, "token_rewards": token_T}
    columns.pop("response_mask_pre")
    per_row = {**batch.per_row, "reward_baseline": torch.zeros(len(batch), dtype=torch.float64)}
    return replace(batch, per_token=columns, per_row=per_row | {"micro_batch_id": torch.tensor([0] * 6 + [1] * 5)})


def same(own: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(own.double(), wanted.double(), rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", VARIANTS)
def test_what_is_not_finite(algos, mode, aggregation, case):
    batch = batch_of(case)
    mine = objective(loss_mode=mode, loss_agg_mode=aggregation, **{**VARIANTS[mode], "adv_estimator": CASES[case]})
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    rows, mask_T = found.rows, batch.column("response_mask")
    advantage_T = rows.advantage_T
    if advantage_T is None:
        advantage_T = torch.repeat_interleave(rows.advantage_N, batch.rows.diff())
    assert not bool(advantage_T.isfinite().all())
    loss, grad_T, logged = upstream_policy(algos, batch, mode, aggregation, advantage_T, torch.float64)
    same(found.per_token.grad_T[mask_T], grad_T[mask_T])
    same(torch.tensor(found.policy_loss), torch.tensor(loss))
    own = verl.metrics(found)
    for metric in METRICS:
        if metric in logged:
            same(torch.tensor(own[metric]), torch.tensor(logged[metric]))

"""Advantages and losses at the edges: nothing trained, nothing scored, groups of one."""

import math
from dataclasses import replace

import pytest
import torch
from objectives import objective_of as objective

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch

NAN = math.nan


def verl_advantages(name, batch, fix=None, **options):
    mine = objective("verl", adv_estimator=name, **options)
    mine = choose(fix).apply(mine) if fix else mine
    return evaluate_rows(batch, mine, torch.float64).advantage_N.tolist()


def test_a_batch_without_a_score():
    assert verl_advantages("gpg", toy_batch([[0, 0]])) == [0, 0]


NAMES = ("grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo", "gpg")


@pytest.mark.parametrize("name", NAMES)
def test_nobody_left_in_the_batch(name):
    batch = toy_batch([[5, 7], [1, 0]], mask=[[0, 0], [0], [0], []])
    if name == "reinforce_plus_plus_baseline":
        with pytest.raises(CannotComputeError, match="two trained tokens"):
            verl_advantages(name, batch)
        return
    assert verl_advantages(name, batch, "rejected-rows") == [0, 0, 0, 0]
    found = evaluate(batch, objective("verl", adv_estimator=name), per_token=True)
    assert found.loss == found.grad_l1 == found.grad_l2 == 0
    assert not bool(found.per_token.grad_T.any())


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("grpo", 3 / (1 + 1e-6)), ("rloo", 3.0), ("rloo_vectorized", 0.0), ("opo", 3.0), ("gpg", 3.0)],
)
def test_a_group_of_one_gets_its_score(name, wanted):
    assert verl_advantages(name, toy_batch([[3]], lengths=1)) == [pytest.approx(wanted, rel=1e-15)]


@pytest.mark.parametrize("trainer", ["trl", "slime"])
def test_a_group_of_one_gets_nothing(trainer):
    assert evaluate_rows(toy_batch([[3]]), objective(trainer)).advantage_N.tolist() == [0]


@pytest.mark.parametrize("name", NAMES)
def test_an_unscored_row_poisons_its_group_in_verl(name):
    batch = toy_batch([[1, NAN, 0], [1, 0, 0]], lengths=2)
    found = verl_advantages(name, batch)
    assert all(math.isnan(value) for value in found[:3])
    if name == "reinforce_plus_plus_baseline":
        assert all(math.isnan(value) for value in found)  # whitening spreads it over the batch
    else:
        assert not any(math.isnan(value) for value in found[3:])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_an_unscored_row_abstains_in_trl(scale):
    mine = objective("trl", scale_rewards=scale)
    whole = evaluate_rows(toy_batch([[1, NAN, 0], [1, 0, NAN], [2, NAN, NAN]]), mine).advantage_N
    alone = evaluate_rows(toy_batch([[1, 0], [1, 0], [2]]), mine).advantage_N
    assert whole[[0, 2, 3, 4, 6]].tolist() == alone.tolist()
    assert whole[[1, 5, 7, 8]].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
def test_empty_rows_and_one_token(trainer):
    options = {"adv_estimator": "grpo"} if trainer == "verl" else {}
    batch = toy_batch([[1, 0, 0.5]], mask=[[], [1], []], policy=-0.5)
    found = evaluate(batch, objective(trainer, **options), dtype=torch.float64, per_token=True)
    advantage = float(found.rows.advantage_N[1])
    weight = 1.0 if trainer == "verl" or trainer == "trl" else 1 / 3
    assert advantage < 0
    assert found.loss == pytest.approx(-advantage * weight)
    assert found.per_token.grad_T.tolist() == pytest.approx([-advantage * weight])


def test_a_batch_without_any_token():
    batch = toy_batch([[1, 0]], mask=[[], []])
    found = evaluate(batch, objective("trl", loss_type="grpo"), per_token=True)
    assert found.loss == 0
    assert found.per_token.grad_T.tolist() == []


def test_missing_columns_leave_a_part_out():
    batch = toy_batch([[1, 0]])
    batch = replace(batch, per_token={"response_mask": batch.column("response_mask")})
    found = evaluate(batch, objective("trl"))
    assert found.rows is not None
    assert found.tokens is None
    with pytest.raises(ValueError, match="column it needs is missing"):
        _ = found.loss

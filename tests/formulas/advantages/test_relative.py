"""Scores relative to the mean of their group, advantages as stored, and rows whose advantage is 0 in float32."""

from dataclasses import replace

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.rows import zero_advantages
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, Objective, RowSet, Scope, Surrogate
from rolloutdoctor.testing import toy_batch

WITHOUT = Scope(frozenset({RowSet.ZERO_ADVANTAGE}))


def objective(estimator, **more):
    return Objective(
        trainer="test",
        version="0",
        advantage=AdvantageRule(estimator=estimator, scale="none", singleton="zero"),
        surrogate=Surrogate(kind="gpg", clip_low=0.0, clip_high=0.0),
        aggregation=Aggregation(mode="token-mean"),
        **more,
    )


def test_relative_to_the_mean():
    batch = toy_batch([[3, 1], [0, 0], [-2, 1], [5]])
    found = evaluate(batch, objective("relative_to_mean"))
    assert found.rows.advantage_N.tolist() == pytest.approx([0.5, -0.5, 0, 0, 0, 0, 0])
    assert advantage_radius(found).likely.isfinite().all()


def test_a_mean_that_is_rounding_decides_nothing():
    batch = toy_batch([[0.3, -0.1, -0.2]])
    assert advantage_radius(evaluate(batch, objective("relative_to_mean"))).likely.isinf().all()


def test_the_residue_of_equal_rewards():
    """The relative residue of n equal rewards does not shrink with them."""
    batch = toy_batch([[0.01] * 7])
    found = evaluate(batch, objective("relative_to_mean"))
    single = torch.full((7,), 0.01)
    residue = (single - single.mean()) / single.mean()
    assert ((residue.abs() - found.rows.advantage_N.abs()) <= advantage_radius(found).largest).all()


@pytest.mark.parametrize("size", [2, 3, 5, 8, 12, 16, 33])
def test_zero_in_float32_is_what_torch_gives(size):
    for value in (0.0, 0.1, 0.3, 0.7, 1.0, 2.9):
        batch = toy_batch([[value] * size, [1.0] + [0.0] * (size - 1)])
        part = evaluate(batch, objective("grpo")).rows
        single = torch.full((size,), value)
        wanted = [*((single - single.mean()) == 0.0).tolist(), *[False] * size]
        assert zero_advantages(batch, part).tolist() == wanted


def test_the_logged_advantage_decides():
    """Of rewards that may have been in another order, the mean may have been another one."""
    batch = toy_batch([[0.3, 0.3, 0.3], [1, 0, 0]])
    logged_N = torch.tensor([1e-8, 1e-8, 0.0, 0.0, -1 / 3, -1 / 3], dtype=torch.float64)
    logged = replace(batch, per_row={**batch.per_row, "advantage": logged_N})
    part = evaluate(batch, objective("grpo")).rows
    # A logged 0 where the advantage is 2/3 is another fault, and no rounding.
    assert zero_advantages(logged, part).tolist() == [False, False, True, False, False, False]


def test_scopes_leave_them_out():
    batch = toy_batch([[1, 1], [1, 0]], lengths=[5, 5, 1, 1])
    scoped = evaluate(batch, objective("grpo", policy=WITHOUT, kl=WITHOUT, denominator=WITHOUT))
    plain = evaluate(batch, objective("grpo"))
    assert scoped.grad_l1 == pytest.approx(plain.grad_l1 * 6)


def test_stored_advantages_need_no_reward():
    batch = toy_batch([[1, 0]], lengths=[2, 3])
    stored_T = torch.tensor([0.5, 0.5, -1.0, 0.0, 2.0])
    rows = {name: x for name, x in batch.per_row.items() if name != "reward"}
    batch = replace(batch, per_row=rows, per_token={**batch.per_token, "advantages": stored_T})
    found = evaluate(batch, objective("as_stored"), per_token=True)
    assert found.per_token.grad_T.tolist() == pytest.approx((-stored_T / 5).tolist())
    assert zero_advantages(batch, found.rows).tolist() == [False, False]

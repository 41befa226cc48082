"""Numbers worked out by hand, and what happens at the edges."""

import math
from dataclasses import replace

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows, stored_kl
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.slime import trainer as slime

NAN = math.nan


def objective(trainer: str, **options: object) -> Objective:
    spec = table.TRAINERS[trainer]
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer=trainer))


def verl_advantages(name, batch, fix=None, **options):
    mine = objective("verl", adv_estimator=name, **options)
    mine = choose(fix).apply(mine) if fix else mine
    return evaluate_rows(batch, mine, torch.float64).advantage_N.tolist()


def pair():
    """Rewards 100 and 1, the first row rejected."""
    return toy_batch([[100, 1]], mask=[[0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("name", "options", "now", "live"),
    [
        ("grpo", {}, -0.7071, 1.0),
        ("grpo", {"norm_adv_by_std_in_grpo": False}, -49.5, 1.0),
        ("grpo_vectorized", {}, -0.7071, 1.0),
        ("rloo", {}, -99.0, 1.0),
        ("rloo_vectorized", {}, -99.0, 0.0),
        ("gpg", {}, -49.5, 1.0),
        ("opo", {}, 0.0, 1.0),
        ("grpo_passk", {}, 0.0, 0.0),
    ],
)
def test_a_rejected_row_moves_its_sibling(name, options, now, live):
    assert verl_advantages(name, pair(), **options)[1] == pytest.approx(now, abs=5e-5)
    assert verl_advantages(name, pair(), "rejected-rows", **options)[1] == pytest.approx(live, abs=2e-6)
    assert verl_advantages(name, pair(), "rejected-rows:singleton-zero", **options)[1] == 0


def test_the_sign_of_a_wrong_answer_flips():
    batch = toy_batch([[1, 1, 0, -5]], mask=[[1, 1], [1, 1], [1, 1], [0, 0]])
    assert verl_advantages("grpo", batch)[:3] == pytest.approx([0.609, 0.609, 0.261], abs=5e-4)
    assert verl_advantages("grpo", batch, "rejected-rows") == pytest.approx([0.577, 0.577, -1.155, 0], abs=5e-4)


def test_gpg_is_hit_twice():
    """Its factor is the batch's rows over those with a score other than zero, so other groups move too."""
    batch = toy_batch([[100, 1], [1, 0]], lengths=3, mask=[[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert verl_advantages("gpg", batch) == pytest.approx([66, -66, 2 / 3, -2 / 3])
    assert verl_advantages("gpg", batch, "rejected-rows") == pytest.approx([0, 1.5, 0.75, -0.75])


def test_a_batch_without_a_score():
    assert verl_advantages("gpg", toy_batch([[0, 0]])) == [0, 0]


def test_slime_logs_the_reward_and_the_value_can_be_inverted():
    batch = toy_batch([[1, 0], [0, 1]], lengths=[2, 3, 4, 1], policy=-1.0, ref=-1.5, values=0.0)
    for coef in (0.1, 0.0):
        mine = objective("slime", advantage_estimator="ppo", kl_coef=coef)
        before = slime.metrics(evaluate(batch, mine, dtype=torch.float64))["rollout/kl"]
        after = slime.metrics(evaluate(batch, choose("kl-inplace").apply(mine), dtype=torch.float64))["rollout/kl"]
        reward, length = 0.5, 2.5  # means over the rows
        assert after == pytest.approx(0.5 if coef else 0.0)
        assert before == pytest.approx(-coef * after + reward / length)
        if coef:
            assert (reward / length - before) / coef == pytest.approx(after, rel=1e-12)
    assert stored_kl(batch, mine).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1]


def test_slime_fix_leaves_advantages_alone():
    batch = toy_batch([[1, 0]], lengths=[2, 3], ref=-1.5, values=0.3)
    mine = objective("slime", advantage_estimator="ppo", kl_coef=0.1)
    fixed = choose("kl-inplace").apply(mine)
    assert torch.equal(evaluate_rows(batch, mine).advantage_T, evaluate_rows(batch, fixed).advantage_T)


@pytest.mark.parametrize(("mode", "wanted"), [("dapo", -4 / 30), ("bnpo", -4 / 30), ("grpo", 0.0)])
def test_the_first_loss_is_zero_only_with_equal_row_weights(mode, wanted):
    """Thirty tokens; one group has advantages 1, -1/2, -1/2 with lengths 8, 5, 3, the rest has none."""
    batch = toy_batch([[1, -0.5, -0.5], [1, 1, 1]], lengths=[8, 5, 3, 6, 5, 3])
    mine = objective("trl", loss_type=mode, scale_rewards="none", num_generations=3)
    found = evaluate(batch, mine, dtype=torch.float64)
    assert found.loss == pytest.approx(wanted, abs=1e-15)
    assert found.grad_l1 > 0.1


# --- edges -----------------------------------------------------------------------------------------------------------

NAMES = ("grpo", "grpo_vectorized", "reinforce_plus_plus_baseline", "rloo", "rloo_vectorized", "opo", "gpg")


@pytest.mark.parametrize("name", NAMES)
def test_nobody_left_in_a_group(name):
    batch = toy_batch([[5, 7], [1, 0]], mask=[[0, 0], [0], [1, 1], [1]])
    fixed = verl_advantages(name, batch, "rejected-rows")
    assert fixed[:2] == [0, 0]
    assert fixed[2] > 0 > fixed[3]
    now = verl_advantages(name, batch)
    if name == "opo":
        # Upstream divides by no weight at all.
        assert all(math.isnan(value) for value in now[:2])
    assert now[2] > 0 > now[3]


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


def test_whitening_needs_two_tokens():
    batch = toy_batch([[1, 0]], mask=[[1], [0]])
    with pytest.raises(CannotComputeError, match="has 1"):
        verl_advantages("reinforce_plus_plus_baseline", batch)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("grpo", 3 / (1 + 1e-6)), ("rloo", 3.0), ("rloo_vectorized", 0.0), ("opo", 3.0), ("gpg", 3.0)],
)
def test_a_group_of_one_gets_its_score(name, wanted):
    assert verl_advantages(name, toy_batch([[3]], lengths=1)) == [pytest.approx(wanted, rel=1e-15)]


def test_pass_at_k_fails_for_a_group_of_one():
    with pytest.raises(CannotComputeError, match="group of one"):
        verl_advantages("grpo_passk", toy_batch([[3], [1, 2]]))


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

"""What each fix does to the loss, the gradient and the metrics."""

from dataclasses import replace

import pytest
import torch

from rolloutdoctor.batch import RolloutBatch
from rolloutdoctor.evaluate import evaluate, evaluate_all
from rolloutdoctor.fixes import choose
from rolloutdoctor.objective import Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers import slime, table, verl
from rolloutdoctor.trainers.options import Layer, parse_version, resolve

VERL_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def objective(trainer: str, **options: object) -> Objective:
    spec = table.TRAINERS[trainer]
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", options)], trainer=trainer))


def with_kl(trainer: str, mode: str) -> Objective:
    if trainer == "trl":
        return objective("trl", loss_type=mode, beta=0.1, max_completion_length=9)
    if trainer == "slime":
        return objective("slime", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", calculate_per_token_loss=mode)
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "loss_agg_mode": mode, "loss_scale_factor": 9}
    return objective("verl", adv_estimator="grpo", **options)


OBJECTIVES = [
    *[pytest.param("trl", mode, id=f"trl-{mode}") for mode in ("grpo", "bnpo", "dr_grpo", "dapo")],
    *[pytest.param("verl", mode, id=f"verl-{mode}") for mode in VERL_MODES],
    *[pytest.param("slime", mode, id=f"slime-{mode}") for mode in (False, True)],
]


def half_equal(seed: int) -> RolloutBatch:
    """Four groups of four, two of them with equal rewards."""
    batch = random_batch(seed, sizes=(4, 4, 4, 4), empty=0.0, rejected=0.0)
    reward_N = batch.per_row["reward"].clone()
    reward_N[batch.groups.index_N < 2] = 0.3
    return replace(batch, per_row={"reward": reward_N})


@pytest.mark.parametrize(("trainer", "mode"), OBJECTIVES)
def test_zero_std_at_loss_level_leaves_other_rows_alone(trainer, mode):
    batch, mine = half_equal(0), with_kl(trainer, mode)
    fixed = choose("zero-std").apply(mine)
    found = evaluate_all(batch, {"": mine, "fixed": fixed}, dtype=torch.float64, per_token=True)
    zero_T = seg.expand(found[""].rows.zero_std_N, batch.rows)
    before_T, after_T = (found[name].per_token.grad_T for name in ("", "fixed"))
    assert torch.equal(before_T[~zero_T], after_T[~zero_T])
    assert float(before_T[zero_T].abs().max()) > 0
    assert float(after_T[zero_T].abs().max()) == 0


def kept_ratio(batch: RolloutBatch, mine: Objective) -> float:
    fixed = choose("zero-std:renormalised").apply(mine)
    found = evaluate_all(batch, {"": mine, "fixed": fixed}, dtype=torch.float64, per_token=True)
    kept_T = ~seg.expand(found[""].rows.zero_std_N, batch.rows) & batch.column("response_mask")
    before_T, after_T = (found[name].per_token.grad_T[kept_T] for name in ("", "fixed"))
    ratios_T = after_T / before_T
    assert float(ratios_T.max() - ratios_T.min()) < 1e-12
    assert float(found["fixed"].per_token.grad_T[~kept_T].abs().max()) == 0
    return float(ratios_T[0])


@pytest.mark.parametrize(("trainer", "mode"), OBJECTIVES)
def test_renormalised_scales_by_the_tokens_that_are_left(trainer, mode):
    batch = half_equal(1)
    zero_N = batch.groups.index_N < 2
    length_N = seg.total(batch.column("response_mask"), batch.rows)
    wanted = 1.0
    if mode in ("bnpo", "dapo", "token-mean"):
        wanted = float(length_N.sum() / length_N[~zero_N].sum())
    if mode is True:
        # slime counts one token for every row without tokens.
        counted_N = length_N.clamp(min=1)
        wanted = float(counted_N.sum() / (counted_N[~zero_N].sum() + zero_N.sum()))
    assert kept_ratio(batch, with_kl(trainer, mode)) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("mode", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_as_proposed_rescales_bnpo_alone(mode):
    batch, mine = half_equal(2), with_kl("trl", mode)
    fixed = choose("zero-std:pr5640").apply(mine)
    found = evaluate_all(batch, {"": mine, "fixed": fixed}, dtype=torch.float64, per_token=True)
    kept_T = ~seg.expand(found[""].rows.zero_std_N, batch.rows) & batch.column("response_mask")
    ratios_T = found["fixed"].per_token.grad_T[kept_T] / found[""].per_token.grad_T[kept_T]
    zero_T = ~kept_T & batch.column("response_mask")
    wanted = int((kept_T | zero_T).sum()) / int(kept_T.sum()) if mode == "bnpo" else 1.0
    torch.testing.assert_close(ratios_T, torch.full_like(ratios_T, wanted), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", ["loss", "renormalised"])
@pytest.mark.parametrize(("trainer", "mode"), [param for param in OBJECTIVES if param.values[0] != "trl"])
def test_logged_kl_loss_is_the_loss_without_its_coefficient(trainer, mode, variant):
    """Rows that a fix takes out of the loss do not come back through the metric with the weight of an empty row."""
    batch = half_equal(3)
    found = evaluate(batch, choose(f"zero-std:{variant}").apply(with_kl(trainer, mode)), dtype=torch.float64)
    logged = verl.metrics(found)["actor/kl_loss"] if trainer == "verl" else slime.metrics(found)["train/kl_loss"]
    assert logged == pytest.approx(found.kl_loss / 0.1, rel=1e-12)
    if trainer == "slime":
        assert abs(slime.metrics(found)["train/ppo_kl"]) < 1


def test_eval_rows_and_groups_of_one_are_left_alone():
    mine = with_kl("trl", "grpo")
    fixed = choose("zero-std").apply(mine)
    for batch in (toy_batch([[1, 1]], ref=-1.5, split="eval"), toy_batch([[1], [1]], ref=-1.5)):
        before, after = evaluate(batch, mine), evaluate(batch, fixed)
        assert before.grad_l1 == after.grad_l1 > 0
    batch = toy_batch([[1, 1]], ref=-1.5)
    assert evaluate(batch, mine).grad_l1 > evaluate(batch, fixed).grad_l1 == 0


@pytest.mark.parametrize(("trainer", "mode"), OBJECTIVES)
def test_versus_sums_are_the_difference_of_the_gradients(trainer, mode):
    batch, mine = half_equal(4), with_kl(trainer, mode)
    fixed = choose("rejected-rows").apply(choose("zero-std").apply(mine))
    found = evaluate_all(batch, {"": mine, "fixed": fixed}, dtype=torch.float64, per_token=True)
    before_T, after_T = (found[name].per_token.grad_T for name in ("", "fixed"))
    tokens = found["fixed"].tokens
    wanted = seg.total((after_T - before_T).abs(), batch.rows)
    assert float(wanted.sum()) > 0
    torch.testing.assert_close(tokens.versus_l1_N, wanted, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(tokens.versus_dot_N, seg.total(after_T * before_T, batch.rows), rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found[""].tokens.versus_l1_N, torch.zeros(len(batch), dtype=torch.float64))
    torch.testing.assert_close(found[""].tokens.versus_dot_N, found[""].tokens.grad_sq_N)
    assert found[""].grad_l2 ** 2 == pytest.approx(float((before_T**2).sum()), rel=1e-12)
    assert found[""].grad_l1 == pytest.approx(float(before_T.abs().sum()), rel=1e-12)

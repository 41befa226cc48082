"""Properties that hold for every batch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives import objective_of as objective

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all, evaluate_rows
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.advantages.scores import Scores
from rolloutdoctor.formulas.advantages.table import ESTIMATORS
from rolloutdoctor.objective.estimators import SPECS
from rolloutdoctor.objective.objective import AdvantageRule, Levels, Objective
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch, toy_batch

OUTCOME = sorted(set(ESTIMATORS) - {"raw"})
SCALES = [*[(name, scale) for name in OUTCOME for scale in ("group", "none")], ("grpo", "batch")]
seeds = st.integers(0, 10_000)


def full(trainer: str) -> Objective:
    """An objective in which every part of the maths takes part."""
    if trainer == "trl":
        return objective("trl", beta=0.1, delta=2.0, loss_type="dapo")
    if trainer == "slime":
        return objective("slime", use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=True)
    return objective("verl", adv_estimator="grpo", use_kl_loss=True, kl_loss_coef=0.1)


@cache
def batch_of(seed: int, name: str = "grpo", **options: object) -> RolloutBatch:
    """A batch that is not to be written to: the same seeds are drawn for every estimator and trainer."""
    sizes = (4, 3, 5, 2) if name == "grpo_passk" else (4, 3, 5, 2, 1)
    return random_batch(seed, **{"sizes": sizes, "dtype": torch.float64, **options})


def advantages(batch: RolloutBatch, name: str, scale: str = "group", *, shift: float = 0.0, factor: float = 1.0):
    """Advantages with all rewards changed; epsilon is negligible, and a lone row has advantage 0."""
    mask_N = torch.tensor([int(row.sum()) for row in batch.column("response_mask").split(batch.rows.diff().tolist())])
    everybody_N = torch.ones(len(batch), dtype=torch.bool)
    reward_N = batch.column("reward") * factor + shift
    named = {"one": reward_N, "other": reward_N.flip(0)} if SPECS[name].rewards == "every" else {}
    scores = Scores(reward_N, everybody_N, mask_N, batch.groups, named)
    levels = Levels(mean="group", std="group" if scale == "group" else None, epsilon=1e-300)
    rule = AdvantageRule(
        estimator=name,
        scale=scale,
        epsilon=1e-300,
        singleton="zero",
        row_levels=levels if name == "level_scores" else None,
    )
    return ESTIMATORS[name](scores, rule).value_N


@pytest.mark.parametrize(("name", "scale"), [each for each in SCALES if not SPECS[each[0]].relative], ids=str)
@settings(max_examples=20)
@given(seed=seeds, shift=st.floats(-10, 10))
def test_a_shift_of_all_rewards_changes_nothing(name, scale, seed, shift):
    """Every group estimator that does not divide by a mean; gpg up to its factor, which counts scores other than 0."""
    batch = batch_of(seed, name, empty=0.0, rejected=0.0, holes=0.0)
    factor = 1.0
    if name == "gpg":
        factor = float((batch.column("reward") != 0).sum() / (batch.column("reward") + shift != 0).sum())
    own, wanted = advantages(batch, name, scale, shift=shift), advantages(batch, name, scale) * factor
    torch.testing.assert_close(own, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "scale"), SCALES, ids=str)
@settings(max_examples=20)
@given(seed=seeds, factor=st.floats(0.01, 100))
def test_a_positive_factor(name, scale, seed, factor):
    """Scaled and normalised estimators ignore it, the others are proportional; whitening adds 1e-8 to the variance."""
    spec = SPECS[name]
    # One other row has no deviation, so that in groups of two nothing is divided.
    sizes = {"sizes": (4, 3, 5, 1)} if spec.of_others else {}
    batch = batch_of(seed, name, empty=0.0, rejected=0.0, holes=0.0, **sizes)
    divided = spec.relative or spec.normalised_over == "rows" or (spec.divides and scale != "none")
    own, wanted = advantages(batch, name, scale, factor=factor), advantages(batch, name, scale)
    if spec.normalised_over == "tokens":
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-9)
    else:
        torch.testing.assert_close(own, wanted if divided else wanted * factor, rtol=1e-9, atol=1e-12)


def permuted(batch: RolloutBatch, order: torch.Tensor) -> tuple[RolloutBatch, torch.Tensor]:
    """The rows in another order, and where each of their tokens was."""
    lengths, starts = batch.rows.diff().tolist(), batch.rows[:-1].tolist()
    where_T = torch.tensor(
        [token for row in order.tolist() for token in range(starts[row], starts[row] + lengths[row])], dtype=torch.int64
    )
    other = replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[order].cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[order], len(batch.groups)),
        per_row={name: column[order] for name, column in batch.per_row.items()},
        per_token={name: column[where_T] for name, column in batch.per_token.items()},
        sample_ids=[batch.sample_ids[row] for row in order.tolist()],
    )
    return other, where_T


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
@given(seed=seeds)
def test_the_order_of_rows_and_the_names_of_groups_change_nothing(trainer, seed):
    batch, mine = batch_of(seed), full(trainer)
    draw = torch.Generator().manual_seed(seed)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    other, where_T = permuted(batch, torch.randperm(len(batch), generator=draw))
    again = evaluate(other, mine, dtype=torch.float64, per_token=True)
    torch.testing.assert_close(again.per_token.grad_T, found.per_token.grad_T[where_T], rtol=1e-12, atol=1e-12)
    assert again.loss == pytest.approx(found.loss, rel=1e-12, abs=1e-12)
    names_G = torch.randperm(len(batch.groups), generator=draw)
    renamed = replace(batch, groups=Groups.of(names_G[batch.groups.index_N], len(batch.groups)))
    again = evaluate(renamed, mine, dtype=torch.float64, per_token=True)
    torch.testing.assert_close(again.per_token.grad_T, found.per_token.grad_T, rtol=1e-12, atol=1e-12)


def test_what_is_of_the_batch():
    """gpg's factor, a mean or a deviation of the batch, and whatever the advantages are normalised over in the end."""
    of_batch = {"gpg", "level_scores", "rloo_scaled"}
    assert {name for name in OUTCOME if not SPECS[name].within_groups} == {
        name for name in OUTCOME if name in of_batch or SPECS[name].normalised_over is not None
    }


@pytest.mark.parametrize("name", [each for each in OUTCOME if SPECS[each].within_groups])
@given(seed=seeds)
def test_a_group_does_not_see_the_others(name, seed):
    batch = batch_of(seed, name)
    before = advantages(batch, name)
    first_N = batch.groups.index_N == 0
    reward_N = torch.where(first_N, batch.column("reward") * 3 + 7, batch.column("reward"))
    after = advantages(replace(batch, per_row={"reward": reward_N}), name)
    assert torch.equal(before[~first_N].nan_to_num(), after[~first_N].nan_to_num())


@given(seed=seeds)
def test_rloo_is_the_centred_score_times_g_over_g_minus_one(seed):
    batch = batch_of(seed)
    size_N = batch.groups.size_G[batch.groups.index_N].double()
    centred = advantages(batch, "grpo", "none")
    wanted = torch.where(size_N > 1, centred * size_N / (size_N - 1), 0.0)
    torch.testing.assert_close(advantages(batch, "rloo"), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@given(seed=seeds)
def test_an_advantage_is_the_score_less_its_baseline(name, seed):
    batch = batch_of(seed)
    rows = evaluate_rows(batch, objective("verl", adv_estimator=name, norm_adv_by_std_in_grpo=False), torch.float64)
    wanted_N = batch.column("reward") - rows.baseline_N
    torch.testing.assert_close(rows.advantage_N, wanted_N, rtol=1e-11, atol=1e-11, equal_nan=True)


@given(u=st.floats(-600, 600))
def test_k3_is_never_negative(u):
    value, slope = kl.term("k3", torch.tensor([u], dtype=torch.float64))
    assert float(value) >= -1e-13
    assert float(slope) * u >= 0


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
@given(seed=seeds)
def test_with_nothing_rejected_live_voters_are_all_voters(name, seed):
    batch = batch_of(seed, name, empty=0.0, rejected=0.0, holes=0.0)
    mine = objective("verl", adv_estimator=name)
    fixed = choose("rejected-rows").apply(mine)
    assert torch.equal(evaluate_rows(batch, mine).advantage_N, evaluate_rows(batch, fixed).advantage_N)


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
@pytest.mark.parametrize("block", [1, 7, 10**9])
@given(seed=seeds)
@settings(max_examples=8)
def test_the_size_of_a_block_does_not_matter(trainer, block, seed):
    batch, mine = batch_of(seed), full(trainer)
    objectives = {"": mine, "fixed": choose("rejected-rows").apply(mine)}
    wanted = evaluate_all(batch, objectives, dtype=torch.float64, per_token=True)["fixed"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rolloutdoctor.evaluation.blocks.BLOCK_TOKENS", block)
        found = evaluate_all(batch, objectives, dtype=torch.float64, per_token=True)["fixed"]
    for name in ("grad_T", "kl_T", "ratio_T", "loss_T", "advantage_T"):
        assert torch.equal(getattr(found.per_token, name), getattr(wanted.per_token, name))
    for name in ("policy_N", "grad_sq_N", "versus_l1_N", "versus_dot_N", "low_clipped_N"):
        assert torch.equal(getattr(found.tokens, name), getattr(wanted.tokens, name))


@cache
def equal_rewards(value: float, size: int) -> RolloutBatch:
    return toy_batch([[value] * size], lengths=[1 + row % 3 for row in range(size)])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), SCALES, ids=str)
@pytest.mark.parametrize("value", [0.1, 0.3, 2.7, -1.1, 1e-3])
def test_equal_rewards_have_exactly_no_advantage(name, scale, value):
    for size in range(2, 65):
        assert advantages(equal_rewards(value, size), name, scale).tolist() == [0.0] * size


@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
@given(seed=seeds, bad=st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_what_is_masked_changes_nothing(trainer, seed, bad):
    batch, mine = batch_of(seed, holes=0.3), full(trainer)
    mask_T = batch.column("response_mask")
    columns = {
        name: torch.where(mask_T, column, bad) if name.endswith("log_probs") else column
        for name, column in batch.per_token.items()
    }
    found = evaluate(batch, mine, per_token=True)
    again = evaluate(replace(batch, per_token=columns), mine, per_token=True)
    assert again.loss == found.loss
    assert torch.equal(again.per_token.grad_T, found.per_token.grad_T)
    assert torch.equal(again.tokens.grad_sq_N, found.tokens.grad_sq_N)

"""Estimators with a time axis: what they have in common, and rejected rows."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import oracles
import pytest
import torch
from objectives import objective_of
from proof.claims import ONLY_DOUBLE, agree, compared, covers, values_of

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.formulas.advantages.table import ESTIMATORS, RESPONSE_ESTIMATORS, TOKEN_ESTIMATORS
from rolloutdoctor.objective.estimators import SPECS, Axis
from rolloutdoctor.objective.required_columns import advantage_columns, has_time_axis
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers.verl import advantages as verl_advantages

TOKEN_NAMES = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline")


objective = partial(objective_of, "verl")


def full_batch(seed, *, dense, sizes=(6, 5, 4, 3, 2, 1, 1), **options):
    """A random batch with every column that an estimator may need."""
    batch = random_batch(seed, sizes=sizes, dtype=torch.float64, **options)
    draw = torch.Generator().manual_seed(seed + 1000)
    columns = {**batch.per_token, "sum_pi_squared": torch.rand(batch.tokens, generator=draw, dtype=torch.float64)}
    if dense:
        columns["token_rewards"] = torch.randn(batch.tokens, generator=draw, dtype=torch.float64)
    row_columns = {
        **batch.per_row,
        "reward_baseline": torch.randn(len(batch), generator=draw, dtype=torch.float64),
    }
    return replace(batch, per_token=columns, per_row=row_columns)


in_slime = partial(objective_of, "slime")


@pytest.mark.parametrize(("gamma", "lambd"), [(0.99, 0.95), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("kl_type", values_of("slime", "kl_loss_type", ["k1", "k2", "k3", "low_var_kl"]))
@covers("slime", "advantage_estimator", "ppo")
@compared("loop", ONLY_DOUBLE)
def test_slime_gae(kl_type, gamma, lambd):
    """The stored results of slime are in float32 alone."""
    batch = random_batch(1, empty=0.0, dtype=torch.float64)
    mine = in_slime(advantage_estimator="ppo", kl_coef=0.1, kl_loss_type=kl_type, gamma=gamma, lambd=lambd)
    found = evaluate_rows(batch, mine, torch.float64).advantage_T.tolist()
    for row, (start, stop) in enumerate(pairwise(batch.rows.tolist())):
        columns = [batch.column(each)[start:stop].tolist() for each in ("old_log_probs", "ref_log_probs", "values")]
        rewards = [-0.1 * oracles.kl(kl_type, old - ref) for old, ref in zip(*columns[:2], strict=True)]
        rewards[-1] += float(batch.column("reward")[row])
        agree(found[start:stop], oracles.gae(rewards, columns[2], gamma, lambd), torch.float64, "advantages")


@pytest.mark.parametrize("normalised", values_of("slime", "rewards_normalization", [False, True]))
@covers("slime", "advantage_estimator", "grpo")
@compared("loop", ONLY_DOUBLE)
def test_slime_rewards(normalised):
    batch = random_batch(2, sizes=(5, 5, 5), empty=0.0, rejected=0.0)
    found = evaluate_rows(batch, in_slime(rewards_normalization=normalised), torch.float64)
    scores, groups = batch.column("reward").tolist(), batch.groups.index_N.tolist()
    wanted = oracles.advantages("grpo", scores, groups, [True] * 15, [1] * 15) if normalised else scores
    agree(found.advantage_N, wanted, torch.float64, "advantages")


@pytest.mark.parametrize("name", TOKEN_NAMES)
def test_what_masked_tokens_hold_does_not_matter(name):
    """Not even the reward: verl loses it where the last token is masked."""
    batch = full_batch(3, dense=False, holes=0.4)
    mine = objective(adv_estimator=name)
    mask_T = batch.column("response_mask")
    assert not mask_T.all()
    spoilt = {
        key: torch.where(mask_T, column, torch.nan) if column.is_floating_point() else column
        for key, column in batch.per_token.items()
    }
    lost_N = ~mask_T[batch.rows[1:].clamp(min=1) - 1]
    rewards = torch.where(lost_N, 1e6, batch.column("reward"))
    other = replace(batch, per_token=spoilt, per_row={**batch.per_row, "reward": rewards})
    assert bool(lost_N.any())
    first, second = (evaluate_rows(each, mine, torch.float64).advantage_T for each in (batch, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", TOKEN_NAMES)
def test_loss_and_gradient_take_the_tokens(name):
    batch = full_batch(5, dense=True)
    found = evaluate(batch, objective(adv_estimator=name), dtype=torch.float64, per_token=True)
    assert torch.equal(found.per_token.advantage_T, found.rows.advantage_T)
    mask_T = batch.column("response_mask")
    at_one = -float(found.rows.advantage_T[mask_T].mean())
    assert found.loss_at_ratio_one == pytest.approx(at_one, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"])
@pytest.mark.parametrize("mask", [[[0, 0], [0, 0]], [[0, 1], [0, 0]]], ids=["no token", "one token"])
def test_whitening_needs_two_tokens(name, mask):
    batch = toy_batch([[1, 0]], mask=mask, values=0.5)
    batch = replace(batch, rewards={"a": batch.column("reward")})
    mine = objective(adv_estimator=name, gdpo_reward_keys="a")
    for each in (mine, choose("rejected-rows").apply(mine)):
        with pytest.raises(CannotComputeError, match="at least two trained tokens"):
            evaluate_rows(batch, each)


def test_tables_agree():
    tables = {Axis.ROWS: ESTIMATORS, Axis.TRAINED_TOKENS: TOKEN_ESTIMATORS, Axis.ALL_TOKENS: RESPONSE_ESTIMATORS}
    for axis in Axis:
        assert {name for name, spec in SPECS.items() if spec.axis is axis} == tables[axis].keys()
    assert {name for name, spec in SPECS.items() if spec.takes_weights} <= TOKEN_ESTIMATORS.keys()
    assert set(verl_advantages.ESTIMATORS.values()) <= TOKEN_ESTIMATORS.keys() | ESTIMATORS.keys()
    assert set(verl_advantages.ESTIMATORS.values()) >= TOKEN_ESTIMATORS.keys() - {
        *("as_stored", "group_scores_to_go", "scores_to_go")
    }
    for name in TOKEN_NAMES:
        mine = objective(adv_estimator=name)
        assert has_time_axis(mine)
        for column in advantage_columns(mine) - {"group_id", "reward", "response_mask", "old_log_probs"}:
            batch = full_batch(0, dense=False)
            kept = {key: value for key, value in batch.per_token.items() if key != column}
            row_columns = {key: value for key, value in batch.per_row.items() if key != column}
            assert evaluate_rows(replace(batch, per_token=kept, per_row=row_columns), mine) is None


# --- rejected rows ---------------------------------------------------------------------------------------------------

RAW = ("grpo", "grpo_vectorized", "rloo", "opo", "gpg")


def survivors(name, rewards, mask, variant="singleton-raw"):
    batch = toy_batch(rewards, mask=mask, ref=-1.5)
    mine = choose(f"rejected-rows:{variant}").apply(objective(adv_estimator=name))
    return evaluate_rows(batch, mine, torch.float64).advantage_N.tolist()


@pytest.mark.parametrize("name", RAW)
def test_one_survivor_has_its_raw_score(name):
    scale = 1 + 1e-6 if name.startswith("grpo") else 1.0
    found = survivors(name, [[100, 3], [2, 4]], [[0], [1], [1], [1]])
    assert found[:2] == pytest.approx([0.0, 3.0 / scale])
    zeroed = survivors(name, [[100, 3], [2, 4]], [[0], [1], [1], [1]], "singleton-zero")
    assert zeroed[:2] == [0.0, 0.0]


def test_one_survivor_has_nothing_in_rloo_vectorized_and_passk():
    for name in ("rloo_vectorized", "grpo_passk"):
        assert survivors(name, [[100, 3], [2, 4]], [[0], [1], [1], [1]])[:2] == [0.0, 0.0]


@pytest.mark.parametrize("name", [*RAW, "rloo_vectorized", "grpo_passk"])
def test_whole_group_rejected_is_zero(name):
    found = survivors(name, [[100, 3], [2, 4]], [[0], [0], [1], [1]])
    assert found[:2] == [0.0, 0.0]
    assert all(value == value for value in found)
    assert survivors(name, [[100, 3], [2, 4]], [[0], [0], [0], [0]]) == [0.0] * 4


@pytest.mark.parametrize("name", [*RAW, "rloo_vectorized", "grpo_passk"])
def test_equal_survivors_have_nothing(name):
    assert survivors(name, [[100, 3, 3]], [[0], [1], [1]]) == [0.0] * 3


def test_the_factor_of_gpg_counts_survivors():
    # survivors 0, 2, 4: three of them, two with a score; with the rejected row it would be 4 / 3
    found = survivors("gpg", [[100, 0], [2, 4]], [[0], [1], [1], [1]])
    assert found == pytest.approx([0.0, 0.0, -1.5, 1.5])


def test_gdpo_normalises_survivors_of_each_reward():
    batch = toy_batch([[0, 0, 0, 0], [0, 0]], mask=[[0, 0], [1, 1], [1, 1], [1, 1], [1], [1]])
    named = {"a": [100.0, 1.0, 2.0, 3.0, 1.0, 0.0], "b": [-50.0, 2.0, 2.0, 2.0, 0.0, 1.0]}
    batch = replace(batch, rewards={key: torch.tensor(column, dtype=torch.float64) for key, column in named.items()})
    mine = objective(adv_estimator="gdpo", gdpo_reward_keys="a,b", gdpo_reward_weights="1,0.5")
    fixed = choose("rejected-rows").apply(mine)
    found = evaluate_rows(batch, fixed, torch.float64)
    assert not torch.equal(evaluate_rows(batch, mine, torch.float64).advantage_N, found.advantage_N)
    groups, votes, lengths = [0, 0, 0, 0, 1, 1], [False, *[True] * 5], [0, 2, 2, 2, 1, 1]
    a, b = (oracles.advantages("grpo", named[key], groups, votes, lengths) for key in ("a", "b"))
    summed = oracles.whitened_rows([x + 0.5 * y for x, y in zip(a, b, strict=True)], lengths)
    assert found.advantage_N.tolist() == pytest.approx(summed, rel=3e-8)
    # b is equal among the survivors of the first group, a is not
    assert not found.zero_std_N.any()
    # The baseline weighs the means like the advantages: 2 + 0.5 * 2 over the survivors, and 0.5 + 0.5 * 0.5
    assert found.baseline_N.tolist() == pytest.approx([3.0] * 4 + [0.75] * 2)


def test_gdpo_names_what_is_missing():
    batch = toy_batch([[1, 0]])
    batch = replace(batch, rewards={"a": batch.column("reward")})
    with pytest.raises(CannotComputeError, match="column rewards has no b, c"):
        evaluate_rows(batch, objective(adv_estimator="gdpo", gdpo_reward_keys="a,b,c"))


def test_outcome_estimators_sum_token_rewards():
    """Masked tokens included, as upstream's sum has no mask."""
    batch = toy_batch([[9, 9]], mask=[[1, 0], [1, 1]], per_token={"token_rewards": [[1, 2], [0, 1]]})
    found = evaluate_rows(batch, objective(adv_estimator="rloo"), torch.float64)
    assert found.score_N.tolist() == [3.0, 1.0]
    assert found.advantage_N.tolist() == [2.0, -2.0]

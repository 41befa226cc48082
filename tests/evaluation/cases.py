"""What every short way of the second pass has to get right, against the general one: each runs these tests.

A file of a way has the fixture `both`, which gives evaluations on both ways.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rolloutdoctor.hypotheses.fixes import FIXES, choose
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import find

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
COUNTS = {"low_clipped_N", "high_clipped_N", "clipped_N", "capped_N"}
NAN, INF = float("nan"), float("inf")
SIZES = (4, 4, 4)
"""Rows of the groups of a batch; a way that takes long for each row has fewer."""

VERL = {"adv_estimator": "grpo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.1}
SLIME = {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}
RUNS = {
    "trl": ("trl", {}),
    "trl kl": ("trl", {"beta": 0.04}),
    "trl bnpo, delta": ("trl", {"beta": 0.04, "loss_type": "bnpo", "delta": 1.5}),
    "trl delta within the bounds": ("trl", {"delta": 1.1}),
    "verl": ("verl", {"adv_estimator": "grpo"}),
    "verl low_var_kl": ("verl", VERL),
    "verl k2, straight through": ("verl", {**VERL, "actor.kl_loss_type": "low_var_kl+"}),
    "verl abs": ("verl", {**VERL, "actor.kl_loss_type": "abs"}),
    "slime k1": ("slime", SLIME),
    "slime k2": ("slime", {**SLIME, "kl_loss_type": "k2"}),
    "slime low_var_kl, dual clip": ("slime@0.3.2", {**SLIME, "kl_loss_type": "low_var_kl", "eps_clip_c": 1.3}),
    "slime rollout log-probs": ("slime", {**SLIME, "use_rollout_logprobs": True}),
}
FIXED = [f"{name}:{variant}" for name, fix in FIXES.items() for variant in fix.variants]


@pytest.fixture(autouse=True)
def quiet():
    """Overflow to infinity is what a ratio without bound does, on a GPU too."""
    with np.errstate(all="ignore"):
        yield


def objective_of(run):
    name, options = RUNS[run]
    name, _, version = name.partition("@")
    trainer = find(name)
    config = resolve(trainer.options, parse_version(version or trainer.newest), [Layer("", options)], trainer=name)
    return trainer.objective(config)


def with_fixes(objective):
    chosen = [choose(label) for label in FIXED]
    return {"": objective, **{fix.label: fix.apply(objective) for fix in chosen if fix.applies_to(objective)}}


def a_batch(seed, dtype=torch.float32, **changes):
    """Groups with and without spread, empty rows, rejected rows, and rows that are masked in part."""
    given = {"sizes": SIZES, "longest": 20, "spread": 0.6, **changes}
    batch = random_batch(seed, dtype=dtype, **given)
    reward_N = batch.per_row["reward"]
    reward_N[batch.groups.index_N % 3 == 0] = 1.0
    return batch


def with_columns(batch, *left_out, **columns):
    kept = {name: column for name, column in batch.per_token.items() if name not in left_out}
    return replace(batch, per_token={**kept, **columns})


def with_pi(batch):
    """`sum_pi_squared` is at least the square of the sampled token's probability."""
    p = batch.column("policy_log_probs").exp()
    return with_columns(batch, sum_pi_squared=p * p + 0.3 * (1 - p) ** 2)


def agree(straight, together, dtype):
    """Every sum of every objective, NaN and infinities in the same rows; `together` may be on a device."""
    for label, one in straight.items():
        wanted, found = one.tokens, together[label].tokens
        for field in fields(wanted):
            mine, theirs = getattr(wanted, field.name), getattr(found, field.name)
            where = (label, field.name)
            assert (mine is None) == (theirs is None), where
            if not isinstance(mine, torch.Tensor):
                continue
            theirs = theirs.cpu()
            if field.name in COUNTS:
                assert torch.equal(mine, theirs), where
                continue
            assert torch.equal(mine.isnan(), theirs.isnan()), where
            assert torch.equal(torch.where(mine.isinf(), mine, 0), torch.where(theirs.isinf(), theirs, 0)), where
            mine, theirs = (each.nan_to_num(0.0, 0.0, 0.0) for each in (mine, theirs))
            # A difference of two derivatives is as exact as these are.
            seen = wanted.grad_l1_N.nan_to_num(0.0, 0.0, 0.0) if field.name == "versus_l1_N" else mine
            off, scale = (float(each.abs().sum() and each.abs().max()) for each in (mine - theirs, seen))
            assert off <= TOLERANCE[dtype] * scale, (*where, off, scale)


@pytest.fixture
def check(both):
    """Compares both ways, and gives what the short one found."""

    def compared(batch, objectives, dtype=torch.float32, **options):
        straight, together = both(batch, objectives, dtype, **options)
        agree(straight, together, dtype)
        return together

    return compared


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("run", RUNS)
def test_all_sums_of_all_fixes(run, dtype, check):
    objectives = with_fixes(objective_of(run))
    found = check(a_batch(19, dtype), objectives, dtype)
    assert len(objectives) > 4
    assert any(float(each.tokens.versus_l1_N.sum()) > 0 for each in found.values())
    assert float(found[""].tokens.low_clipped_N.sum()) > 0


@pytest.mark.parametrize(("chunk", "number"), [(1, 1), (4, 2), (8192, 3)])
def test_however_rows_are_cut(chunk, number, check):
    objectives = dict(list(with_fixes(objective_of("verl low_var_kl")).items())[:number])
    check(a_batch(5, longest=6, sizes=(3, 3)), objectives, chunk=chunk)


def test_rows_of_several_tiles_and_chunks(check):
    batch = random_batch(6, sizes=(3, 2), longest=900)
    check(batch, with_fixes(objective_of("trl kl")), chunk=300)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.float64, 1.0), (torch.float32, 1e-3)])
@pytest.mark.parametrize("run", ["trl", "verl low_var_kl"])
def test_exact_norm_of_the_logits(run, dtype, scale, check):
    """Of usual tokens, and of such that are all but certain: of these hardly anything is left of 1 - 2 p."""
    batch = a_batch(7, dtype)
    policy_T = batch.column("policy_log_probs")
    columns = {
        name: batch.column(name) - policy_T + scale * policy_T
        for name in ("policy_log_probs", "old_log_probs", "ref_log_probs")
    }
    found = check(with_pi(with_columns(batch, **columns)), with_fixes(objective_of(run)), dtype)
    assert float(found[""].tokens.logits_sq_N.sum()) > 0


@pytest.mark.parametrize("run", ["trl bnpo, delta", "verl low_var_kl", "slime k1"])
def test_on_policy(run, check):
    check(with_columns(a_batch(8), "old_log_probs"), with_fixes(objective_of(run)))


def test_weighted_kl_past_the_bound_of_the_ratio(check):
    objective = objective_of("verl low_var_kl")
    objective = replace(
        objective,
        surrogate=replace(objective.surrogate, log_ratio_bound=0.5),
        kl_loss=replace(objective.kl_loss, ratio_weighted=True, clamp=0.2, estimator="k3"),
    )
    check(a_batch(10), with_fixes(objective))


TIES = {"cap": 1.0, "clip_low": 0.0, "clip_high": 0.0}


@pytest.mark.parametrize("changes", [TIES, {**TIES, "cap": None}, {**TIES, "clip_high": 0.2}, {**TIES, "cap": 1.1}])
@pytest.mark.parametrize("run", ["trl kl", "verl low_var_kl"])
def test_ties(run, changes, check):
    """Half of the tokens have a ratio of exactly one, which is where the bounds and the cap are."""
    objective = objective_of(run)
    objective = replace(objective, surrogate=replace(objective.surrogate, **changes))
    batch = a_batch(11)
    policy_T, old_T = batch.column("policy_log_probs"), batch.column("old_log_probs")
    same_T = torch.arange(batch.tokens) % 2 == 0
    batch = with_columns(batch, old_log_probs=torch.where(same_T, policy_T, old_T))
    check(batch, with_fixes(objective))


@pytest.mark.parametrize("run", ["trl bnpo, delta", "verl low_var_kl", "slime k1"])
def test_a_masked_token_leaks_nothing(run, check):
    batch = with_pi(a_batch(12))
    mask_T = batch.column("response_mask")
    odd_T = torch.tensor([NAN, INF, -INF]).repeat(batch.tokens)[: batch.tokens]
    assert set(odd_T[~mask_T].nan_to_num(0.0).tolist()) == {0.0, *odd_T[1:3].nan_to_num(0.0).tolist()}
    spoilt = {
        name: torch.where(mask_T, column, odd_T)
        for name, column in batch.per_token.items()
        if column.is_floating_point()
    }
    objectives = with_fixes(objective_of(run))
    clean = check(batch, objectives)
    dirty = check(with_columns(batch, **spoilt), objectives)
    for label in objectives:
        assert torch.equal(clean[label].tokens.grad_sq_N, dirty[label].tokens.grad_sq_N)
        assert not dirty[label].tokens.policy_N.isnan().any()


ODD = [
    (column, value)
    for column in ("policy_log_probs", "old_log_probs", "ref_log_probs")
    for value in (NAN, INF, -INF, -120.0, 15.0)
]


@pytest.mark.parametrize(
    "run", ["trl bnpo, delta", "trl kl", "verl low_var_kl", "slime k1", "slime low_var_kl, dual clip"]
)
def test_odd_values_of_trained_tokens(run, check):
    """In a group without spread, of which some fixes take rows out of a scope, and in another: NaN as torch has."""
    batch = random_batch(13, sizes=(len(ODD),) * 2, longest=3, rejected=0.0, holes=0.0, empty=0.0, adjacent=True)
    batch.per_row["reward"][: len(ODD)] = 1.0
    columns = {name: batch.column(name).clone() for name, _ in ODD}
    for row in range(len(batch)):
        name, value = ODD[row % len(ODD)]
        columns[name][batch.rows[row]] = value
    objective = objective_of(run)
    out = replace(
        objective,
        policy=objective.policy.leaving_out(RowSet.ZERO_STD),
        kl=objective.kl.leaving_out(RowSet.ZERO_STD),
    )
    batch = with_columns(batch, **columns)
    found = check(batch, {"": objective, "out": out, **with_fixes(objective)})
    assert found["out"].rows.zero_std_N.tolist() == [True] * len(ODD) + [False] * len(ODD)
    assert (found["out"].tokens.grad_l1_N[: len(ODD)] == 0).all()
    assert found["out"].tokens.policy_N[len(ODD) :].isnan().any()
    check(batch, {"": out, "back": objective})


def test_no_tokens_at_all(check):
    batch = random_batch(14, empty=1.0)
    assert batch.tokens == 0
    check(batch, with_fixes(objective_of("trl kl")))


def test_the_same_twice(both):
    objectives = with_fixes(objective_of("trl kl"))
    one, two = (both(a_batch(15), objectives, torch.float32)[1] for _ in range(2))
    for label in objectives:
        for field in fields(one[label].tokens):
            mine, theirs = (getattr(each[label].tokens, field.name) for each in (one, two))
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine, theirs)

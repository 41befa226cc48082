"""The short way on the CPU against the general one, in blocks of few tokens."""

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
import torch
from evaluation.cases import *  # noqa: F403 - its tests are these
from evaluation.cases import NAN, RUNS, a_batch, agree, objective_of, with_columns, with_fixes, with_pi

from rolloutdoctor.evaluation import blocks, fast_cpu
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.fast_cpu import ClippedCpuEvaluator
from rolloutdoctor.formulas import kl
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.testing import random_batch


@pytest.fixture
def taken():
    """Of every block that the short way was asked for, whether it took it."""
    return []


@pytest.fixture
def both(monkeypatch, taken):
    """Evaluations of the general way, and of the short one where it can."""
    original = ClippedCpuEvaluator.add

    def add(self, block):
        taken.append(original(self, block))
        return taken[-1]

    def evaluated(batch, objectives, dtype, chunk=16):
        with monkeypatch.context() as patch:
            patch.setattr(ClippedCpuEvaluator, "of", lambda *given, **options: None)
            straight = evaluate_all(batch, objectives, dtype=dtype)
        with monkeypatch.context() as patch:
            patch.setattr(blocks, "BLOCK_TOKENS", chunk)
            patch.setattr(ClippedCpuEvaluator, "add", add)
            together = evaluate_all(batch, objectives, dtype=dtype)
        return straight, together

    return evaluated


@pytest.mark.parametrize("run", RUNS)
def test_every_block_of_usual_values_is_taken(run, check, taken):
    check(with_pi(a_batch(16)), with_fixes(objective_of(run)))
    has_free_range = run != "trl delta within the bounds"
    assert taken == [True] * len(taken)
    assert (len(taken) > 3) == has_free_range


@pytest.mark.parametrize("rejected", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("run", ["trl kl", "trl bnpo, delta", "verl low_var_kl"])
def test_rows_that_are_not_trained_stay_where_they_are(run, rejected, check, taken):
    """Nothing is packed where a row is trained as a whole or not at all, and nothing of a rejected row enters."""
    batch = a_batch(17, rejected=rejected, holes=0.0)
    mask_T = batch.column("response_mask")
    assert bool(mask_T.all()) == (rejected == 0.0)
    spoilt = {
        name: torch.where(mask_T, column, NAN) for name, column in batch.per_token.items() if column.is_floating_point()
    }
    found = check(with_columns(batch, **spoilt), with_fixes(objective_of(run)))
    assert all(taken)
    assert len(taken) > 1
    assert not any(each.tokens.grad_l1_N.isnan().any() for each in found.values())


@pytest.mark.parametrize("run", ["trl kl", "verl low_var_kl", "slime low_var_kl, dual clip"])
def test_a_value_that_is_not_finite_sends_its_block_the_general_way(run, check, taken):
    batch = a_batch(18)
    policy_T = batch.column("policy_log_probs").clone()
    policy_T[int(batch.column("response_mask").nonzero()[len(policy_T) // 2])] = NAN
    check(with_columns(batch, policy_log_probs=policy_T), with_fixes(objective_of(run)))
    assert sorted(taken) == [False] + [True] * (len(taken) - 1)
    assert len(taken) > 3


@pytest.mark.parametrize("far", [9.9, 10.1, 25.0])
@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize("run", ["trl kl", "verl low_var_kl", "slime low_var_kl, dual clip"])
def test_a_kl_at_its_clamp_and_beyond(run, side, far, check, taken, monkeypatch):
    """`k3` is 10 at u = 11 and at u = -2.61; verl clamps u at 20 as well."""
    monkeypatch.setattr(fast_cpu, "_PIECE", 8)
    batch = a_batch(21)
    reference_T = batch.column("ref_log_probs").clone()
    place = int(batch.column("response_mask").nonzero()[len(reference_T) // 2])
    u = far + 1 if side > 0 else -math.log(far + 3.6)
    reference_T[place] = batch.column("policy_log_probs")[place] - u
    check(with_columns(batch, ref_log_probs=reference_T), with_fixes(objective_of(run)))
    assert all(taken)
    assert len(taken) > 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_in_memory_at_hand_is_the_same_to_the_bit(dtype):
    generator = torch.Generator().manual_seed(22)
    policy_T, reference_T = torch.randn(2, 4096, generator=generator, dtype=dtype) * torch.logspace(-6, 2, 4096)
    policy_T[:4], reference_T[:4] = torch.tensor([0.0, 200.0, math.inf, NAN]), 0.0
    policy_T, reference_T = policy_T.to(dtype), reference_T.to(dtype)
    room_T, slope_T = torch.full((2, 4096), NAN, dtype=dtype)
    kl.k3_into(policy_T, reference_T, room_T, slope_T)
    for found, wanted in zip((room_T, slope_T), kl.k3(policy_T - reference_T), strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_an_advantage_that_is_not_finite_sends_the_step_the_general_way(check, taken):
    batch = a_batch(19)
    batch.per_row["reward"][0] = NAN
    found = check(batch, {"": objective_of("verl low_var_kl")})
    assert found[""].rows.advantage_N.isnan().any()
    assert taken == []


def test_a_row_longer_than_a_block(check, taken):
    check(random_batch(20, sizes=(3, 2), longest=900), with_fixes(objective_of("trl kl")))
    assert all(taken)
    assert len(taken) > 3


@pytest.mark.parametrize("run", ["slime k1", "slime low_var_kl, dual clip"])
def test_rows_of_which_a_fix_leaves_nothing(run, check, taken):
    """Those without spread have advantages, for scores are not centred, and with the fix no derivative."""
    objective = objective_of(run)
    objective = replace(objective, advantage=replace(objective.advantage, estimator="raw"))
    out = replace(
        objective,
        policy=objective.policy.leaving_out(RowSet.ZERO_STD),
        kl=objective.kl.leaving_out(RowSet.ZERO_STD),
    )
    batch = a_batch(24)
    batch.per_row["reward"][:] = 1.0 + torch.arange(len(batch)) * (batch.groups.index_N % 2)
    found = check(batch, {"": objective, "out": out})
    assert all(taken)
    zero_gradient_N = found["out"].rows.zero_std_N
    assert 0 < int(zero_gradient_N.sum()) < len(batch)
    assert float(found[""].tokens.grad_l1_N[zero_gradient_N].sum()) > 0
    assert float(found["out"].tokens.grad_l1_N[zero_gradient_N].sum()) == 0
    assert float(found["out"].tokens.grad_l1_N[~zero_gradient_N].sum()) > 0


def test_beside_objectives_that_do_not_share_their_terms(check, taken):
    objective = objective_of("verl low_var_kl")
    other = replace(objective, surrogate=replace(objective.surrogate, clip_low=0.05, clip_high=0.05))
    found = check(a_batch(22), {"": objective, "other": other, **with_fixes(objective)})
    assert all(taken)
    assert taken
    assert float(found["other"].tokens.versus_l1_N.sum()) > 0


@pytest.mark.parametrize("value", [0.0, NAN])
def test_token_values_are_kept_beside(value, monkeypatch):
    """The sums are the same whether tokens are wanted or not, and so are the tokens."""
    objectives, batch = with_fixes(objective_of("trl kl")), a_batch(23)
    batch.column("policy_log_probs")[batch.column("response_mask").nonzero()[5]] = value
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 16)
    sums, kept = evaluate_all(batch, objectives), evaluate_all(batch, objectives, per_token=True)
    monkeypatch.setattr(ClippedCpuEvaluator, "of", lambda *given, **options: None)
    straight = evaluate_all(batch, objectives, per_token=True)
    for label in objectives:
        for field in fields(straight[label].per_token):
            wanted, found = (getattr(each[label].per_token, field.name) for each in (straight, kept))
            assert torch.equal(wanted.nan_to_num(7.0), found.nan_to_num(7.0)), (label, field.name)
        for name in ("grad_l1_N", "policy_N", "versus_l1_N"):
            wanted, found = (getattr(each[label].tokens, name) for each in (sums, kept))
            assert torch.equal(wanted.nan_to_num(7.0), found.nan_to_num(7.0)), (label, name)


def test_what_the_comparison_would_miss(both):
    """The tests above can fail."""
    straight, together = both(a_batch(21), {"": objective_of("trl kl")}, torch.float32)
    together[""].tokens.grad_sq_N[3] *= 1 + 1e-4
    with pytest.raises(AssertionError):
        agree(straight, together, torch.float32)


def test_a_part_of_a_block_is_evaluated_at_a_time(monkeypatch):
    """The temporaries of an evaluation are beside the step in memory: none of them is as long as a block."""
    batch, seen = random_batch(3, sizes=(16,) * 8, longest=4_000), []
    original = ClippedCpuEvaluator.add

    def add(self, block):
        taken = original(self, block)
        seen.append((taken, block.tokens, max(map(len, self._buffers.values()))))
        return taken

    monkeypatch.setattr(ClippedCpuEvaluator, "add", add)
    evaluate_all(batch, {"": objective_of("trl kl")})
    assert batch.tokens > blocks.BLOCK_TOKENS
    assert all(taken for taken, _, _ in seen)
    most = blocks.PART_TOKENS * 5 // 4 + 4_000
    assert max(tokens for _, tokens, _ in seen) <= most
    assert max(room for _, _, room in seen) <= most


@pytest.mark.parametrize("size", [1, 5, 30, 10**6])
def test_parts_are_all_rows_of_a_block_in_their_order(size, monkeypatch):
    monkeypatch.setattr(blocks, "PART_TOKENS", size)
    batch = random_batch(3, sizes=(4,) * 8, longest=9)
    rows, tokens = slice(5, 29), slice(int(batch.rows[5]), int(batch.rows[29]))
    parts = list(blocks.parts_of(batch, rows, tokens, torch.float32))
    assert (parts[0].rows.start, parts[-1].rows.stop) == (5, 29)
    assert all(one.rows.stop == other.rows.start for one, other in pairwise(parts))
    assert all(len(part.runs) for part in parts)
    assert [part.places for part in parts] == [
        slice(int(batch.rows[part.rows.start]), int(batch.rows[part.rows.stop])) for part in parts
    ]

"""Several objectives in one pass: each gives what it gives alone, and the comparison is that of the token values."""

from dataclasses import fields, make_dataclass, replace
from itertools import pairwise

import pytest
import torch

from rolloutdoctor.evaluation import blocks, rows
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all
from rolloutdoctor.evaluation.general import BY_ROW, token_terms
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.search.hypotheses.fixes import FIXES, choose
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import find

# Two ways to the same sums are equal to the bit in one order.
pytestmark = pytest.mark.one_order

# Its newer trainer does not say which row of a session with masked rows is the last: such batches are not computed.
VERL = {"trainer.use_v1": False, "actor.use_kl_loss": True}
RUNS = {
    "trl dapo": ("trl", {"beta": 0.04}),
    "trl bnpo, delta": ("trl", {"beta": 0.04, "loss_type": "bnpo", "delta": 1.5}),
    "trl sequence ratio": ("trl", {"beta": 0.04, "importance_sampling_level": "sequence"}),
    "verl grpo": ("verl", {"adv_estimator": "grpo", "actor.kl_loss_coef": 0.01, **VERL}),
    "verl tokens": (
        "verl",
        {"adv_estimator": "reinforce_plus_plus_baseline", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01},
    ),
    "verl kl_cov": ("verl", {"adv_estimator": "grpo", "actor.policy_loss.loss_mode": "kl_cov", **VERL}),
    "slime gspo": ("slime", {"advantage_estimator": "gspo", "use_kl_loss": True, "kl_loss_coef": 0.1}),
}
FIXED = [f"{name}:{variant}" for name, fix in FIXES.items() for variant in fix.variants]


def objectives_of(run):
    name, options = RUNS[run]
    trainer = find(name)
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("", options)], trainer=name)
    objective = trainer.objective(config)
    chosen = [choose(label) for label in FIXED]
    fixed = {fix.label: fix.apply(objective) for fix in chosen if fix.applies_to(objective)}
    return {"": objective, **fixed}


def a_batch(seed):
    """Groups with and without spread, rejected rows, rows that are masked in part, and trajectories of several."""
    batch = random_batch(seed, sizes=(4, 2, 5, 3) * 6, longest=25)
    reward_N = batch.per_row["reward"]
    reward_N[batch.groups.index_N % 3 == 0] = 1.0
    micro_N = torch.arange(len(batch)) // 6
    statuses = [("stop", "length", "error")[row % 3] for row in range(len(batch))]
    errors = ["late" if row % 29 == 0 else None for row in range(len(batch))]
    trajectory_N = torch.where(batch.groups.index_N % 3 == 0, batch.groups.index_N, -1)
    per_row = {**batch.per_row, "micro_batch_id": micro_N, "trajectory_id": trajectory_N}
    per_row["task_id"] = batch.groups.index_N // 2 + 1
    return replace(batch, per_row=per_row, statuses=statuses, errors=errors)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("run", RUNS)
def test_together_as_alone(run, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 120)
    batch, objectives = a_batch(7), objectives_of(run)
    together = evaluate_all(batch, objectives)
    shared = 0
    for label, objective in objectives.items():
        alone, found = evaluate(batch, objective).tokens, together[label].tokens
        for field in fields(alone):
            mine, theirs = getattr(alone, field.name), getattr(found, field.name)
            if isinstance(mine, torch.Tensor) and not field.name.startswith(("versus", "logits")):
                assert torch.equal(mine, theirs), (label, field.name)
        shared += int((found.versus_l1_N == 0).sum())
    assert shared > len(batch)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("run", RUNS)
def test_the_comparison_is_that_of_the_tokens(run):
    batch, objectives = a_batch(8), objectives_of(run)
    sums = evaluate_all(batch, objectives)
    tokens = evaluate_all(batch, objectives, per_token=True)
    reference_T, radius_T = tokens[""].per_token.grad_T.double(), derivative_radius(batch, tokens[""])
    changed = 0
    for label, found in sums.items():
        grad_T = tokens[label].per_token.grad_T.double()
        # Either side of each of the two derivatives may be off.
        either_T = 2 * (derivative_radius(batch, tokens[label]) + radius_T)
        l1_N = seg.total((grad_T - reference_T).abs(), batch.rows)
        dot_N = seg.total(grad_T * reference_T, batch.rows)
        assert_within(found.tokens.versus_l1_N, l1_N, seg.total(either_T, batch.rows))
        assert_within(
            found.tokens.versus_dot_N, dot_N, seg.total(either_T * (grad_T.abs() + reference_T.abs()), batch.rows)
        )
        changed += int((l1_N > 0).sum())
    assert changed


def derivative_radius(batch, found):
    """`rounding.derivative` of every token, ``[T]``."""
    term, tokens = found.objective.kl_loss, found.tokens
    values, mask_T = found.per_token, batch.column("response_mask")
    policy_T = (values.advantage_T * values.ratio_T).double() * seg.expand(tokens.policy_weight_N, batch.rows)
    x_T = batch.column("ref_log_probs").double() - batch.column("policy_log_probs").double()
    weight_T = seg.expand(tokens.weight_N, batch.rows) * (term.coef if term else 0.0)
    return torch.where(mask_T, rounding.derivative(policy_T, weight_T, x_T.exp()).likely, 0.0)


def assert_within(found, wanted, radius):
    off = (found - wanted).abs()
    assert bool((off <= radius).all()), float((off / radius).nan_to_num(0.0).max())


@pytest.mark.parametrize("run", ["trl dapo", "verl tokens", "slime gspo"])
def test_what_only_moves_terms_shares_its_rows(run, monkeypatch):
    seen, original = [], rows.evaluate_rows
    monkeypatch.setattr(rows, "evaluate_rows", lambda *given: seen.append(given[1]) or original(*given))
    batch, objectives = a_batch(8), objectives_of(run)
    parts = rows.row_parts(batch, objectives, torch.float32)
    assert parts["zero-std:loss"].score_N is parts[""].score_N
    assert 1 < len(seen) < len(objectives)
    for label, objective in objectives.items():
        alone, found = original(batch, objective), parts[label]
        assert found.objective is objective
        for field in fields(alone):
            mine, theirs = getattr(alone, field.name), getattr(found, field.name)
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine, theirs), (label, field.name)
            elif field.name != "objective":
                assert mine is theirs is None, (label, field.name)


def test_an_unknown_field_that_differs_is_not_shared():
    """Two objectives share a token's terms only where every field that may decide them is the same."""
    objective = objectives_of("verl grpo")[""]
    kind = make_dataclass("Extended", [("later", int, 0)], bases=(Objective,), frozen=True, kw_only=True)
    later = kind(**{one.name: getattr(objective, one.name) for one in fields(objective)})
    assert token_terms(later) == token_terms(replace(later, policy=objective.policy.leaving_out(RowSet.ZERO_STD)))
    assert token_terms(later) != token_terms(replace(later, later=1))
    assert token_terms(later) != token_terms(objective)


def test_every_field_is_decided_on():
    """Where a new field decides the terms of a token, `is_within_rows` has to know it, too."""
    of_tokens = {"surrogate", "kl_loss", "policy_correction", "sampler_correction", "gates", "unknown_loss"}
    assert {one.name for one in fields(Objective)} == BY_ROW | of_tokens
    assert not BY_ROW & of_tokens


@pytest.mark.parametrize("column", ["old_log_probs", "rollout_log_probs"])
def test_a_kl_of_other_log_probs_has_no_gradient(column):
    """Only the policy's log-probs have a derivative."""
    objective = objectives_of("slime gspo")[""]
    other = replace(objective, kl_loss=replace(objective.kl_loss, log_probs=column))
    without = replace(objective, kl_loss=None)
    made = evaluate_all(random_batch(3), {"": without, "other": other}, dtype=torch.float64, per_token=True)
    assert torch.equal(made["other"].per_token.grad_T, made[""].per_token.grad_T)
    assert float(made["other"].tokens.kl_N.abs().sum()) > 0


def spoilt(batch):
    """The step with values at masked tokens that are no numbers."""
    mask_T = batch.column("response_mask")
    odd_T = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(batch.tokens)[: batch.tokens]
    columns = {name: x_T if x_T is mask_T else torch.where(mask_T, x_T, odd_T) for name, x_T in batch.per_token.items()}
    return replace(batch, per_token=columns)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("run", RUNS)
def test_sums_are_the_same_whatever_is_masked_kept_or_cut(run, monkeypatch):
    batch, objectives = a_batch(12), objectives_of(run)
    wanted = evaluate_all(batch, objectives)
    kept = evaluate_all(batch, objectives, per_token=True)
    dirty = evaluate_all(spoilt(batch), objectives)
    monkeypatch.setattr(blocks, "PART_TOKENS", 7)
    pieces = evaluate_all(batch, objectives)
    for label, one in wanted.items():
        for field in fields(one.tokens):
            mine = getattr(one.tokens, field.name)
            for other in (kept, dirty, pieces) if isinstance(mine, torch.Tensor) else ():
                assert torch.equal(mine, getattr(other[label].tokens, field.name)), (label, field.name)


def test_a_part_of_a_block_is_evaluated_at_a_time(monkeypatch):
    """The temporaries of an evaluation are beside the step in memory: none of them is as long as a block."""
    batch, seen, original = random_batch(3, sizes=(16,) * 8, longest=4_000), [], blocks.AdjacentRows.__init__
    monkeypatch.setattr(
        blocks.AdjacentRows, "__init__", lambda self, *given: original(self, *given) or seen.append(self.tokens)
    )
    evaluate_all(batch, objectives_of("trl dapo"))
    assert batch.tokens > blocks.BLOCK_TOKENS
    assert max(seen) <= blocks.PART_TOKENS * 5 // 4 + 4_000


@pytest.mark.parametrize("size", [1, 5, 30, 10**6])
def test_parts_are_all_rows_of_a_block_in_their_order(size, monkeypatch):
    monkeypatch.setattr(blocks, "PART_TOKENS", size)
    batch = random_batch(3, sizes=(4,) * 8, longest=9)
    rows, tokens = slice(5, 29), slice(int(batch.rows[5]), int(batch.rows[29]))
    parts = list(blocks.parts_of(batch, rows, tokens, torch.float32))
    assert (parts[0].rows.start, parts[-1].rows.stop) == (5, 29)
    assert all(one.rows.stop == other.rows.start for one, other in pairwise(parts))
    assert all(len(part.runs) for part in parts)
    places = [slice(int(batch.rows[part.rows.start]), int(batch.rows[part.rows.stop])) for part in parts]
    assert [part.places for part in parts] == places

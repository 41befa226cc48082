"""Several objectives in one pass: each gives what it gives alone, and the comparison is that of the token values."""

from dataclasses import fields, replace

import pytest
import torch

from rolloutdoctor.evaluation import blocks, rows
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all
from rolloutdoctor.evaluation.fast_cpu import ClippedCpuEvaluator
from rolloutdoctor.hypotheses.fixes import FIXES, choose
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import find

RUNS = {
    "trl dapo": ("trl", {"beta": 0.04}),
    "trl bnpo, delta": ("trl", {"beta": 0.04, "loss_type": "bnpo", "delta": 1.5}),
    "trl sequence ratio": ("trl", {"beta": 0.04, "importance_sampling_level": "sequence"}),
    "verl grpo": ("verl", {"adv_estimator": "grpo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01}),
    "verl tokens": (
        "verl",
        {"adv_estimator": "reinforce_plus_plus_baseline", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01},
    ),
    "verl kl_cov": (
        "verl",
        {"adv_estimator": "grpo", "actor.policy_loss.loss_mode": "kl_cov", "actor.use_kl_loss": True},
    ),
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
    """Groups with and without spread, rejected rows, and rows that are masked in part."""
    batch = random_batch(seed, sizes=(4, 2, 5, 3) * 6, longest=25)
    reward_N = batch.per_row["reward"]
    reward_N[batch.groups.index_N % 3 == 0] = 1.0
    micro_N = torch.arange(len(batch)) // 6
    return replace(batch, per_row={**batch.per_row, "micro_batch_id": micro_N})


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


@pytest.mark.parametrize("run", ["trl dapo", "trl bnpo, delta", "verl grpo", "verl tokens"])
def test_fast_and_general_path_differ_by_no_more_than_they_round(run, monkeypatch):
    """The bound that docs/exact.md states, row by row, for derivative, KL and policy term."""
    batch, objectives = a_batch(9), objectives_of(run)
    fast = evaluate_all(batch, objectives)
    monkeypatch.setattr(ClippedCpuEvaluator, "of", lambda *given, **options: None)
    general = evaluate_all(batch, objectives, per_token=True)
    for label, one in general.items():
        mine, theirs, radius_T = one.tokens, fast[label].tokens, 2 * derivative_radius(batch, one)
        assert_within(theirs.grad_l1_N, mine.grad_l1_N, seg.total(radius_T, batch.rows))
        squares_T = radius_T * 2 * one.per_token.grad_T.double().abs() + radius_T.square()
        assert_within(theirs.grad_sq_N, mine.grad_sq_N, seg.total(squares_T, batch.rows))
        length_N = batch.trained.diff().double()
        assert_within(theirs.kl_N, mine.kl_N, 2 * rounding.k3(mine.kl_N, length_N).likely)
        size_N = seg.total((one.per_token.advantage_T * one.per_token.ratio_T).double().abs(), batch.rows)
        assert_within(theirs.policy_N, mine.policy_N, 2 * 8 * rounding.SINGLE * size_N)


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

"""What the fast path is given, and what goes the general way."""

from dataclasses import fields, make_dataclass, replace

import pytest
import torch

from rolloutdoctor.evaluation.covered import BY_ROW, OF_TOKENS, is_covered, token_terms
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.fast_cpu import ClippedCpuEvaluator
from rolloutdoctor.objective.objective import KlTerm, Objective, RowSet
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import find

VERL = {"adv_estimator": "grpo", "actor.use_kl_loss": True}
COVERED = {
    "trl grpo": ("trl", {"beta": 0.04, "loss_type": "grpo", "delta": 2.0}),
    "trl dapo": ("trl", {}),
    "verl grpo": ("verl", VERL),
    "slime grpo": ("slime", {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_type": "low_var_kl"}),
}


def objective_of(trainer, options):
    spec = find(trainer)
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("", options)], trainer=trainer))


def test_every_estimator_of_the_fast_path_is_known():
    """A new estimator goes the general way until the fast path has it."""
    objective = objective_of(*COVERED["verl grpo"])
    assert is_covered(objective)
    assert not is_covered(replace(objective, kl_loss=replace(objective.kl_loss, estimator="k4")))


def extended(record):
    """The record with one more field, as a later version may have it, at its default."""
    kind = make_dataclass("Extended", [("later", int, 0)], bases=(type(record),), frozen=True, kw_only=True)
    return kind(**{one.name: getattr(record, one.name) for one in fields(record)})


EXTENDED = {
    "objective": extended,
    "surrogate": lambda one: replace(one, surrogate=extended(one.surrogate)),
    "KL of the loss": lambda one: replace(one, kl_loss=extended(one.kl_loss)),
    "KL in the reward": lambda one: replace(one, kl_reward=extended(one.kl_reward)),
    "aggregation": lambda one: replace(one, aggregation=extended(one.aggregation)),
    "aggregation of the policy": lambda one: replace(one, policy_aggregation=extended(one.aggregation)),
    "correction": lambda one: replace(one, correction=extended(one.correction)),
    **{
        f"scope {name}": lambda one, name=name: replace(one, **{name: extended(getattr(one, name))})
        for name in ("baseline_rows", "policy", "kl", "denominator", "metric")
    },
}


@pytest.mark.parametrize("where", EXTENDED)
def test_a_field_that_no_short_way_knows_is_left_to_the_general_one(where, monkeypatch):
    objective = replace(objective_of(*COVERED["verl grpo"]), kl_reward=KlTerm(estimator="k1", coef=0.1))
    later = EXTENDED[where](objective)
    assert is_covered(objective)
    assert not is_covered(later)
    taken, original = [], ClippedCpuEvaluator.of.__func__

    def of(cls, *given, **also):
        taken.append(cls)
        return original(cls, *given, **also)

    monkeypatch.setattr(ClippedCpuEvaluator, "of", classmethod(of))
    batch = random_batch(0)
    found = [evaluate_all(batch, {"": each})[""].loss for each in (objective, later)]
    assert taken == [ClippedCpuEvaluator]
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize("column", ["old_log_probs", "rollout_log_probs"])
def test_a_kl_of_other_log_probs_has_no_gradient(column):
    """Only the policy's log-probs have a derivative, and only the general way knows."""
    objective = objective_of("slime", {"use_kl_loss": True, "kl_loss_coef": 0.1})
    assert is_covered(objective)
    other = replace(objective, kl_loss=replace(objective.kl_loss, log_probs=column))
    assert not is_covered(other)
    batch = random_batch(3)
    without = replace(objective, kl_loss=None)
    made = evaluate_all(batch, {"": without, "other": other}, dtype=torch.float64, per_token=True)
    assert torch.equal(made["other"].per_token.grad_T, made[""].per_token.grad_T)
    assert float(made["other"].tokens.kl_N.abs().sum()) > 0


def test_an_unknown_field_that_differs_is_not_shared():
    """Two objectives share a token's terms only where every field that may decide them is the same."""
    objective = objective_of(*COVERED["verl grpo"])
    later = extended(objective)
    assert token_terms(later) == token_terms(replace(later, policy=objective.policy.leaving_out(RowSet.ZERO_STD)))
    assert token_terms(later) != token_terms(replace(later, later=1))
    assert token_terms(later) != token_terms(objective)


def test_every_field_is_decided_on():
    """A new field goes the general way; whether a short one can take it belongs into `covered`."""
    assert {one.name for one in fields(Objective)} == BY_ROW.keys() | OF_TOKENS.keys()
    assert not BY_ROW.keys() & OF_TOKENS.keys()

"""What the kernel is given, and what stays with torch."""

import sys
from dataclasses import fields, make_dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import rolloutdoctor.evaluation.cuda
from rolloutdoctor.evaluation import tokens
from rolloutdoctor.evaluation.covered import BY_ROW, OF_TOKENS, is_covered, token_terms
from rolloutdoctor.evaluation.cuda import fused
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
LEFT = {
    "ratio of a row": ("trl", {"importance_sampling_level": "sequence"}),
    "another term": ("trl", {"loss_type": "cispo"}),
    "rloo": ("trl-rloo", {}),
    "ratio of a row in slime": ("slime", {"advantage_estimator": "gspo"}),
    "selections": ("verl", {**VERL, "actor.policy_loss.loss_mode": "kl_cov"}),
    "advantages of tokens": ("verl", {"adv_estimator": "reinforce_plus_plus"}),
    "weights of tokens": ("verl", {**VERL, "algorithm.rollout_correction.rollout_is": "token"}),
    "gates": ("trl", {"off_policy_mask_threshold": 0.5}),
}


def objective_of(trainer, options):
    spec = find(trainer)
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("", options)], trainer=trainer))


@pytest.fixture
def given(monkeypatch):
    """How many objectives are given to the kernel, each time that it is called; it is said to be there."""
    calls = []

    def sums(batch, objective, values, dtype):
        calls.append(len(values))
        names = ("policy_N", "kl_N", "grad_l1_N", "grad_sq_N", "versus_l1_N")
        return [dict.fromkeys(names, torch.zeros(len(batch), dtype=torch.float64)) for _ in values]

    monkeypatch.setattr(tokens.fused, "is_taken", lambda batch, kernel: kernel == "triton")
    monkeypatch.setattr(tokens.fused, "token_sums", sums)
    return calls


@pytest.mark.parametrize("name", COVERED)
def test_covered(name, given):
    objective = objective_of(*COVERED[name])
    evaluate_all(random_batch(0), {"": objective, "again": replace(objective)})
    assert given == []
    evaluate_all(random_batch(0), {"": objective, "again": replace(objective)}, kernel="triton")
    assert given == [2]


@pytest.mark.parametrize("name", LEFT)
def test_left_to_torch(name, given):
    objective, batch = objective_of(*LEFT[name]), random_batch(0)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.zeros(len(batch), dtype=torch.int64)})
    found = evaluate_all(batch, {"": objective}, kernel="triton")[""]
    assert given == []
    assert found.loss == evaluate_all(batch, {"": objective})[""].loss


def test_kept_tokens_are_left_to_torch(given):
    objective = objective_of(*COVERED["trl dapo"])
    evaluate_all(random_batch(0), {"": objective}, per_token=True, kernel="triton")
    evaluate_all(random_batch(0), {"": objective, "kept": objective}, per_token=["kept"], kernel="triton")
    assert given == []


def test_objectives_that_do_not_share_are_left_to_torch(given):
    objective = objective_of(*COVERED["verl grpo"])
    other = replace(objective, surrogate=replace(objective.surrogate, cap=2.0))
    evaluate_all(random_batch(0), {"": objective, "other": other}, kernel="triton")
    assert given == []


def test_not_on_the_cpu():
    assert not fused.is_taken(random_batch(0), "triton")
    assert fused.why_not(torch.device("cpu")) == "the kernel runs on a GPU, and this run is evaluated on the CPU"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU as far as it is asked what it is: everything that the kernel needs is there."""
    monkeypatch.setattr(fused, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(fused, "_launch_failure", lambda: None)
    return torch.device("cuda")


MISSING = {
    "Triton is not installed": (fused, "find_spec", lambda name: None),
    "this torch is built without it": (torch.version, "cuda", None),
    "needs compute capability 8.0, and this GPU has 7.5": (torch.cuda, "get_device_capability", lambda device: (7, 5)),
    "launches no kernel here": (fused, "_launch_failure", lambda: "Triton launches no kernel here: no C compiler"),
}


@pytest.mark.parametrize("why", MISSING)
def test_why_it_cannot_run(why, gpu, monkeypatch):
    assert fused.why_not(gpu) is None
    monkeypatch.setattr(*MISSING[why])
    assert why in fused.why_not(gpu)


def test_a_triton_that_cannot_launch_says_why(monkeypatch):
    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(rolloutdoctor.evaluation.cuda, "kernel", SimpleNamespace(probe=Broken()), raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    found = fused._launch_failure.__wrapped__()
    assert found == "Triton launches no kernel here: Failed to find C compiler."


def test_every_estimator_of_the_kernel_is_known():
    """A new estimator is refused until the kernel has it."""
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


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is here")
def test_without_triton_nothing_imports_it():
    evaluate_all(random_batch(0), {"": objective_of(*COVERED["trl dapo"])})
    assert "rolloutdoctor.evaluation.cuda.kernel" not in sys.modules

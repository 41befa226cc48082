"""NeMo-RL: what it refuses, its releases, healthy runs, and what of its metrics is recomputed."""

from dataclasses import replace

import pytest
import torch
from goldens.nemo_rl_cases import SIZES
from trainers.nemo_rl.test_goldens import batch_of, objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, random_batch, toy_batch
from rolloutdoctor.trainers.nemo_rl.trainer import TRAINER
from rolloutdoctor.trainers.options import Layer, resolve

STATED = {
    "grpo.adv_estimator.name": "grpo",
    "normalize_rewards": True,
    "adv_estimator.use_leave_one_out_baseline": True,
    "reference_policy_kl_penalty": 0.01,
    "reference_policy_kl_type": "k3",
    "num_generations_per_prompt": 8,
}


def healthy(steps=6, **options):
    """Steps with all that NeMo-RL can log, as it computes it; rewards of 0 and 1, one update a step."""
    objective = objective_of({**STATED, **options})
    batches, logged = [], []
    for step in range(1, steps + 1):
        batch = random_batch(step, sizes=(8, 8, 8, 8), longest=40, spread=0.02, rejected=0.0, empty=0.0)
        draw = torch.Generator().manual_seed(step)
        reward = (torch.rand(len(batch), generator=draw) > 0.5).double()
        kept = {name: x for name, x in batch.per_token.items() if name not in ("values", "old_log_probs")}
        kept["response_mask"] = kept["response_mask_pre"] = torch.ones(batch.tokens, dtype=torch.bool)
        batch = replace(batch, step=step, per_row={**batch.per_row, "reward": reward}, per_token=kept)
        found = evaluate(batch, objective)
        if found.rows.advantage_N is not None:
            batch = replace(batch, per_row={**batch.per_row, "advantage": found.rows.advantage_N})
        batches.append(batch)
        logged.append(dict(TRAINER.metrics(found)))
    return batches, logged


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"grpo.adv_estimator.name": "reinforce_plus_plus", "use_kl_in_reward": True},
        {"use_importance_sampling_correction": True, "token_level_loss": False},
    ],
    ids=["default", "reinforce++", "corrected"],
)
def test_a_healthy_run_gives_no_warning(options):
    batches, logged = healthy(**options)
    report = diagnose(batches, trainer="nemo-rl", options={**STATED, **options}, logged=logged)
    assert [(each.code, each.headline) for each in report.findings if each.severity is not Severity.INFO] == []
    agreed = [each for each in report.audit if each.compared]
    assert {"train/loss", "train/probs_ratio", "train/token_mult_prob_error"} <= {each.quantity for each in agreed}
    assert all(each.agree == each.compared for each in agreed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_level_importance_ratios": True}, "needs token_level_loss = false"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo goes with neither of"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo goes with neither of"),
        ({"ratio_clip_c": 1.0}, "must be above 1"),
        ({"truncated_importance_sampling_type": "tis"}, "needs use_importance_sampling_correction"),
        ({"truncated_importance_sampling_ratio": 2.0}, "need each other"),
        ({"use_kl_in_reward": True, "force_on_policy_ratio": True}, "needs the log-probs"),
        ({"grpo.adv_estimator.name": "opd"}, "teacher's log-probs"),
        ({"ppo.adv_estimator.name": "gae"}, "PPO is not computed"),
        ({"invalid_tool_call_advantage": -5.0}, "which tokens they are"),
    ],
)
def test_refused(options, words):
    with pytest.raises(UsageError, match=words):
        TRAINER.objective(resolve(TRAINER.options, (0, 7, 0), [Layer("test", options)], trainer="nemo-rl"))


@pytest.mark.parametrize(
    ("version", "is_release", "is_refused"),
    [
        ((0, 6, 0), True, False),
        ((0, 7, 0), False, False),
        ((0, 7, 0), True, True),
    ],
)
def test_a_kind_without_a_bound_cuts_nothing_up_to_0_6_0(version, is_release, is_refused):
    options = {"loss_fn.truncated_importance_sampling_type": "tis"}
    config, plain = (
        replace(resolve(TRAINER.options, version, [Layer("test", each)], trainer="nemo-rl"), is_release=is_release)
        for each in (options, {})
    )
    if is_refused:
        with pytest.raises(UsageError, match="needs use_importance_sampling_correction"):
            TRAINER.objective(config)
    else:
        assert TRAINER.objective(config) == TRAINER.objective(plain)


@pytest.mark.parametrize(
    ("kind", "bounds", "words"),
    [
        ("icepop", {"ratio": 2.0}, "ratio_min must be set"),
        ("tis", {"ratio": 2.0, "ratio_min": 3.0}, "must not be above"),
        ("seq-mask-tis", {"ratio": 2.0, "ratio_min": 0.5, "rows": True}, "goes without"),
    ],
)
def test_refused_bounds(kind, bounds, words):
    bounds = dict(bounds)
    rows = bounds.pop("rows", False)
    options = {f"truncated_importance_sampling_{name}": value for name, value in {"type": kind, **bounds}.items()}
    options |= {"use_importance_sampling_correction": True, "sequence_level_importance_ratios": rows}
    with pytest.raises(UsageError, match=words):
        objective_of({**options, "token_level_loss": not rows})


def test_releases():
    """Up to 0.6.0 the KL has no ratio, stays in the loss beside that of the reward, and there is no CISPO."""
    old, new = (objective_of({}, version) for version in ((0, 6, 0), (0, 7, 0)))
    assert (old.kl_loss.ratio_weighted, new.kl_loss.ratio_weighted) == (False, True)
    batch = batch_of("shaped")
    before, after = (evaluate(batch, each, per_token=True) for each in (old, new))
    assert before.loss == after.loss
    assert not torch.equal(before.per_token.grad_T, after.per_token.grad_T)
    in_reward = {"grpo.adv_estimator.name": "reinforce_plus_plus", "use_kl_in_reward": True}
    assert objective_of(in_reward, (0, 6, 0)).kl_loss is not None
    assert objective_of(in_reward).kl_loss is None
    with pytest.raises(UsageError, match=r"0\.6\.0"):
        objective_of({"use_cispo": True}, (0, 6, 0))
    assert "release 0.6.0" in objective_of({"use_on_policy_kl_approximation": True}, (0, 6, 0)).unknown_loss
    assert "after release 0.7.0" in objective_of({"positive_example_nll_weight": 0.1}, (0, 7, 1)).unknown_loss
    assert objective_of({"positive_example_nll_weight": 0.1}) == objective_of({})


def test_a_mean_of_row_weights_needs_the_micro_batches():
    """Upstream multiplies two axes there, so that it grows with the rows of a micro-batch."""
    options = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    batch = batch_of("shaped")
    name = "train/sampling_importance_ratio"
    known = TRAINER.metrics(evaluate(batch, objective_of(options)))
    per_row = {key: x for key, x in batch.per_row.items() if key != "micro_batch_id"}
    assert name in known
    assert name not in TRAINER.metrics(evaluate(replace(batch, per_row=per_row), objective_of(options)))
    assert known[name] > 4


def test_metrics_without_reference_log_probs():
    """As the trainer's own files are: what compares sampler and trainer needs no more."""
    for case in SIZES:
        batch = batch_of(case)
        bare = replace(batch, per_token={name: x for name, x in batch.per_token.items() if name != "ref_log_probs"})
        whole, less = (TRAINER.metrics(evaluate(each, objective_of({}))) for each in (batch, bare))
        assert {*whole} - {*less} == {"train/loss", "train/kl_penalty", "train/positive_nll_loss"}
        assert all(less[name] == whole[name] for name in less)


def test_the_loss_of_a_log_in_parts():
    config = resolve(
        TRAINER.options, (0, 7, 0), [Layer("test", {"reference_policy_kl_penalty": 0.5})], trainer="nemo-rl"
    )
    parts = TRAINER.log.loss_parts({"train/loss": 1.0, "train/kl_penalty": 0.2}, config)
    assert (parts.policy, parts.kl) == (pytest.approx(0.9), pytest.approx(0.1))
    assert TRAINER.log.loss_parts({"train/loss": 1.0}, config) is None


def test_group_sizes():
    sizes = [
        TRAINER.group_size(resolve(TRAINER.options, (0, 7, 0), [Layer("test", options)], trainer="nemo-rl"), "train")
        for options in ({}, {"use_dynamic_sampling": True})
    ]
    assert sizes == [16, None]


def test_without_micro_batches_a_step_is_one():
    batch = toy_batch([[1, 0], [1, 1]], lengths=3, policy=-1.0, old=-1.1, ref=-1.2, rollout=-1.3)
    found = TRAINER.metrics(evaluate(batch, objective_of({})))
    assert found["train/num_valid_samples"] == 4
    assert found["train/probs_ratio"] == pytest.approx(torch.tensor(0.1).exp().item(), rel=1e-6)
    assert "train/advantages/mean" not in found  # it is over tokens that a filter masked as well

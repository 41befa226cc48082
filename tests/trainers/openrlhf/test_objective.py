"""OpenRLHF: a step as its own functions log it gives no warning, and what is not computed is refused by name."""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.results.errors import UnstatedError, UsageError
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.table import trainer_from_metric_names

E, CORRECTS = "algo.advantage.estimator", "algo.advantage.is_correction_enable"


def diagnosed(case, config):
    result = results("openrlhf")[case, config]
    logged = dict(result.scalars["f32"])
    logged.pop("loss")
    batch = batch_of("openrlhf", case, torch.float32)
    batch = replace(batch, per_token={**batch.per_token, "advantages": torch.tensor(result.advantage["f32"])})
    size = {"rollout.n_samples_per_prompt": 2 if case == "pairs" else 4}
    return diagnose([batch], trainer="openrlhf@0.11.0", options=result.options | size, logged=[logged])


@pytest.mark.slow
@pytest.mark.parametrize("config", ["gae", "reinforce", "rloo, KL", "group_norm", "KL k3 in the loss", "gspo", "tis"])
@pytest.mark.parametrize("case", ["ragged", "pairs", "two_steps"])
def test_a_healthy_step_gives_no_warning(case, config):
    found = diagnosed(case, config)
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA003"], told
    assert not [one for one in told if one.severity.label == "error"], told


def test_nothing_is_assumed_of_the_estimator():
    with pytest.raises(UnstatedError, match=r"--set algo\.advantage\.estimator=NAME"):
        objective_of("openrlhf", **{"algo.kl.init_coef": 0.0})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"algo.kl.target": 6.0}, "coefficient of a step is not logged"),
        ({E: "grpo"}, "expected one of gae"),
        ({"reward.clip_range": [1.0]}, "is no low,high"),
        ({"reward.clip_range": [1.0, -1.0]}, "is no low,high"),
        ({"actor.policy_loss_type": "sapo"}, "ppo, gspo"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("openrlhf", **{E: "rloo"} | options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "clip", "level": "seq"}, "clip needs"),
        ({"mode": "clip", "level": "token", "gating": "tv"}, "clip needs"),
        ({"level": "seq", "gating": "binary_kl"}, "upper bound alone"),
    ],
)
def test_corrections_that_upstream_refuses_are_refused(options, match):
    named = {f"algo.advantage.is_correction_{name}": value for name, value in options.items()}
    with pytest.raises(UsageError, match=match):
        objective_of("openrlhf@0.11.2", **{E: "rloo"} | named)


def test_a_correction_is_said_by_the_words_of_its_release():
    by_type, by_level = {CORRECTS: True}, {"algo.advantage.is_correction_level": "token"}
    assert objective_of("openrlhf@0.11.0", **{E: "rloo"} | by_type).gates[0].outside == "cut"
    assert objective_of("openrlhf@0.11.2", **{E: "rloo"} | by_level).gates[0].outside == "zero"
    with pytest.raises(UsageError, match=r"is gone since 0\.11\.2"):
        objective_of("openrlhf@0.11.2", **{E: "rloo"} | by_type)
    with pytest.raises(UsageError, match=r"came with 0\.11\.2"):
        objective_of("openrlhf@0.11.0", **{E: "rloo"} | by_level)


def test_the_logged_loss_is_weighted_twice_by_tokens():
    result = results("openrlhf")["rejected", "gspo"]
    share = result.scalars["f32"]["train/policy_loss"] / result.scalars["f32"]["loss"]
    (found,) = [one for one in diagnosed("rejected", "gspo").findings if one.code == "RDM007"]
    assert found.severity.label == "info"
    assert "weighs micro-batches by their tokens twice" in found.headline
    assert found.measures["loss_share"].value == pytest.approx(share, rel=1e-4)


def test_its_log_is_told_from_those_of_others():
    shared = ["train/kl", "train/reward", "train/loss", "train/grad_norm"]
    assert trainer_from_metric_names([*shared[:2], "train/policy_loss", "train/actor_grad_norm"]).name == "openrlhf"
    # Any loop has these names.
    assert trainer_from_metric_names(shared) is None


def test_later_epochs_have_no_metrics_of_the_update():
    assert "update" in objective_of("openrlhf", **{E: "rloo"}).also_logs
    assert "update" not in objective_of("openrlhf", **{E: "rloo", "train.max_epochs": 2}).also_logs


def test_gspo_with_the_correction_compares_with_the_sampler():
    mine = objective_of("openrlhf@0.11.0", **{E: "rloo", "actor.policy_loss_type": "gspo", CORRECTS: True})
    assert (mine.surrogate.old, mine.gates) == ("rollout_log_probs", ())

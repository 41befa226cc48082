"""open-instruct: a step as its own code logs it gives no warning, its total is said not to be the loss."""

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.open_instruct.trainer import TRAINER
from rolloutdoctor.trainers.options import resolve
from rolloutdoctor.trainers.releases import parse_version


def findings_of(case, config, **options):
    result = results("open_instruct")[case, config]
    logged = dict(result.scalars["f32"])
    logged.pop("loss")
    batch = batch_of("open_instruct", case, torch.float32)
    found = diagnose([batch], trainer="open-instruct", options=result.options | options, logged=[logged])
    return {one.code: one for one in found.findings}


@pytest.mark.slow
@pytest.mark.parametrize("config", ["default", "standard", "cispo", "KL 3", "rho mask", "denominator", "no reference"])
@pytest.mark.parametrize("case", ["ragged", "two_ranks"])
def test_a_healthy_step_gives_no_warning(case, config):
    found = findings_of(case, config)
    told = [one for one in found.values() if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA004"], told
    assert not [one for one in told if one.severity.label == "error"], told


def test_the_share_of_the_loss_that_is_logged_is_named():
    found = findings_of("ragged", "default", num_samples_per_prompt_rollout=4)["RDM007"]
    scalars = results("open_instruct")["ragged", "default"].scalars["f32"]
    share = scalars["loss/total_avg"] / (scalars["loss/policy_avg"] + scalars["loss/kl_avg"])
    assert found.severity.label == "info"
    assert found.measures["loss_share"].value == pytest.approx(share, rel=1e-4)
    assert abs(share - 1) > 0.4


@pytest.mark.slow
def test_a_total_that_is_the_loss_disagrees():
    """The recomputed total is upstream's: a log with the sum of both terms in its place is not."""
    result = results("open_instruct")["ragged", "default"]
    logged = dict(result.scalars["f32"])
    logged["loss/total_avg"] = logged.pop("loss")
    batch = batch_of("open_instruct", "ragged", torch.float32)
    found = diagnose([batch], trainer="open-instruct", options=result.options, logged=[logged])
    assert any("loss/total_avg" in one.headline + one.message for one in found.findings if one.code != "RDM007")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"load_ref_policy": False}, "needs beta = 0"),
        ({"use_vllm_logprobs": True}, "leaves no ratio"),
        ({"loss_denominator": "tokens"}, "a number above 0"),
        ({"loss_denominator": -1}, "a number above 0"),
        ({"truncated_importance_sampling_ratio_cap": 2.0}, "is gone since 0.3.0"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("open-instruct", **options)


def test_options_by_release():
    def of(version):
        return TRAINER.objective(resolve(TRAINER.options, parse_version(version), [], trainer="open-instruct"))

    old, new = of("0.2.0"), of("0.3.0")
    assert (old.advantage.scale, new.advantage.scale) == ("group", "none")
    assert (old.surrogate.clip_high, new.surrogate.clip_high) == (0.2, 0.272)
    assert (old.gates, len(new.gates)) == ((), 1)
    assert "val/rho_weight" not in old.also_logs


def test_ranks_that_share_a_sequence_leave_its_parts_unknown():
    batch = batch_of("open_instruct", "two_ranks", torch.float32)
    own = objective_of("open-instruct", sequence_parallel_size=2)
    found = TRAINER.metrics(evaluate(batch, own))
    assert "loss/total_avg" not in found
    assert "loss/policy_avg" in found

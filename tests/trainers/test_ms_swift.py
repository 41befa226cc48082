"""ms-swift: a step as its own functions log it, what is reported of it, and what is refused."""

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose

TINY = {"num_generations": 4, "max_completion_length": 9}


def report(case, config, **options):
    """The report on a step of the stored results, with the metrics and advantages that the real functions gave."""
    result = results("ms_swift")[case, config]
    batch = batch_of("ms_swift", case, torch.float32)
    batch.per_row["advantage"] = torch.tensor(result.advantage["f32"], dtype=torch.float64)
    made = {**TINY, **result.options, **options}
    return diagnose([batch], trainer="ms-swift", options=made, logged=[result.scalars["f32"]])


@pytest.mark.parametrize("config", ["grpo", "bnpo", "sapo", "sequence, grpo", "rloo", "token_truncate, grpo"])
def test_a_healthy_step_gives_no_warning(config):
    found = report("two_steps", config, gradient_accumulation_steps=4)
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA003"], told
    assert not [one for one in found.findings if one.severity.label == "error"]


@pytest.mark.parametrize("config", ["dapo", "cispo", "sequence, dapo"])
def test_dapo_and_cispo_are_divided_by_their_micro_batches(config):
    found = report("two_steps", config, gradient_accumulation_steps=4)
    (one,) = [one for one in found.findings if one.code == "RDG006"]
    assert (one.severity.label, one.verdict) == ("warning", "confirmed")
    assert one.measures["divided_by"].value == 4


def test_one_micro_batch_is_divided_once():
    assert "RDG006" not in {one.code for one in report("ragged", "dapo").findings}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_type": "fipo"}, "loss_type = fipo"),
        ({"loss_type": "real"}, "loss_type = real"),
        ({"advantage_estimator": "rloo", "scale_rewards": "group"}, "leave-one-out"),
        ({"off_policy_sequence_mask_delta": 0.1, "loss_type": "bnpo"}, "denominator"),
        ({"top_entropy_quantile": 0.5, "overlong_filter": True}, "quantile"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"teacher_model": "some/model"}, "teacher_model"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("ms-swift", **options)

"""SkyRL: a step as its own functions log it gives no warning, and what is not computed is refused by name."""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose


@pytest.mark.slow
@pytest.mark.parametrize("config", ["regular", "dual_clip", "cispo", "regular, prompt_mean", "tis token", "rloo"])
@pytest.mark.parametrize("case", ["ragged", "two_steps"])
def test_a_healthy_step_gives_no_warning(case, config):
    result = results("skyrl")[case, config]
    logged = dict(result.scalars["f32"])
    logged.pop("loss")
    batch = batch_of("skyrl", case, torch.float32)
    batch = replace(batch, per_token={**batch.per_token, "advantages": torch.tensor(result.advantage["f32"])})
    found = diagnose([batch], trainer="skyrl", options=result.options, logged=[logged])
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA003"], told
    assert not [one for one in told if one.severity.label == "error"], told


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"advantage_batch_normalize": True}, "mean over padding"),
        ({"use_kl_in_reward": True}, "only one of them"),
        ({"loss_reduction": "seq_mean_token_sum_norm"}, "max_seq_len"),
        (
            {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout", "tis_ratio_type": "token"},
            "counts the weights twice",
        ),
        ({"step_wise_trajectories": True}, "step_wise_trajectories"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("skyrl", **options)

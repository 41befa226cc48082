"""AReaL: a step as its own code logs it gives no warning, lost rewards are named, what is not computed is refused."""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import batch_of, results
from importers.importing import DATA, findings
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import diagnose


@pytest.mark.parametrize("config", ["grpo", "whitened", "decoupled", "mask", "sapo", "sequence", "KL k1", "recomputed"])
@pytest.mark.parametrize("case", ["ragged", "two_steps"])
def test_a_healthy_step_gives_no_warning(case, config):
    result = results("areal")[case, config]
    logged = dict(result.scalars["f32"])
    logged.pop("loss")
    batch = batch_of("areal", case, torch.float32)
    batch = replace(batch, per_token={**batch.per_token, "advantages": torch.tensor(result.advantage["f32"])})
    found = diagnose([batch], trainer="areal", options=result.options, logged=[logged])
    told = [one for one in found.findings if one.severity.label in ("warning", "error")]
    assert not [one for one in told if one.code[:3] in ("RDG", "RDM") or one.code == "RDA004"], told
    assert not [one for one in told if one.severity.label == "error"], told


def test_a_row_that_ends_in_a_masked_token_loses_its_reward():
    """Upstream's: such rows train on an advantage of 0 where their reward would have given another."""
    batch, options = batch_of("areal", "masked_ends", torch.float64), results("areal")["masked_ends", "grpo"].options
    mine = objective_of("areal", **options)
    kept = choose("masked-end").apply(mine)
    lost, free = (evaluate_rows(batch, one, torch.float64).advantage_N for one in (mine, kept))
    changed = lost != free
    assert int(changed.sum()) >= 4
    assert not bool(lost[changed].any())


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"actor.mask_no_eos_with_zero": True}, "prompts with their padding"),
        ({"actor.overlong_reward_penalty": True}, "needs overlong_tokens"),
        ({"actor.gae_timestep_unit": "turn"}, "which turn"),
        ({"actor.reward_norm.mean_level": "batch"}, "computed: None, group"),
        ({"actor.reward_norm.std_level": "group"}, "mean_level = None"),
        ({"actor.adv_norm.mean_level": "group"}, "computed: None, batch"),
        ({"actor.adv_norm.mean_level": "batch"}, "batch and batch"),
        ({"actor.use_sapo_loss": True, "actor.use_decoupled_loss": True}, "so does AReaL"),
        ({"actor.use_cispo_loss": True}, "needs eps_clip_higher"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("areal", **{"actor.kl_ctl": 0.0, **options})


def test_a_dump_without_options_has_no_error():
    found = findings(DATA / "areal" / "rollout")
    assert not [one for one in found.findings if one.severity.label == "error"]

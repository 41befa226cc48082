"""AReaL: a step as its own code logs it gives no warning, lost rewards are named, what is not computed is refused."""

from dataclasses import replace

import pytest
import torch
from goldens.real_results import batch_of, results
from importers.importing import DATA, findings
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.formulas.advantages.levels import normalised
from rolloutdoctor.objective.objective import Levels
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import diagnose


@pytest.mark.slow
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


REJECTS = {"actor.use_decoupled_loss": True, "actor.rejection_sampling.level": "token"}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"actor.mask_no_eos_with_zero": True}, "prompts with their padding"),
        ({"actor.overlong_reward_penalty": True}, "needs overlong_tokens"),
        ({"actor.gae_timestep_unit": "turn"}, "which turn"),
        ({**REJECTS, "actor.rejection_sampling.upper": 1.0}, "upper = 1 is not above 1, as metric = ratio needs"),
        ({**REJECTS, "actor.rejection_sampling.lower": 0.0}, "lower = 0 is not above 0"),
        ({**REJECTS, "actor.rejection_sampling.lower": 6.0}, "lower = 6 is above upper = 5"),
        (
            {**REJECTS, "actor.rejection_sampling.metric": "kl_k2", "actor.rejection_sampling.upper": 0.0},
            "upper = 0 is not above 0, as metric = kl_k2 needs",
        ),
        (
            {**REJECTS, "actor.rejection_sampling.metric": "kl_k3", "actor.rejection_sampling.action": "clamp"},
            "action = clamp needs metric = ratio",
        ),
        ({"actor.use_sapo_loss": True, "actor.use_decoupled_loss": True}, "so does AReaL"),
        ({"actor.use_cispo_loss": True}, "needs eps_clip_higher"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(options, match):
    with pytest.raises(UsageError, match=match):
        objective_of("areal", **{"actor.kl_ctl": 0.0, **options})


@pytest.mark.parametrize(("upper", "lower"), [(1.001, None), (5.0, 1e-6), (5.0, 5.0)])
def test_bounds_that_areal_takes(upper, lower):
    bounds = {"actor.rejection_sampling.upper": upper, "actor.rejection_sampling.lower": lower}
    assert objective_of("areal", **{"actor.kl_ctl": 0.0, **REJECTS, **bounds}).gates


def test_the_only_row_of_a_group_has_an_unbiased_deviation_of_one():
    """Whatever its tokens are; AReaL's special case."""
    levels = Levels(mean="group", std="group", epsilon=1e-5)
    values = [torch.tensor(x) for x in ([2.0, 4.0, 1.0, 3.0], [1, 1, 1, 1], [0, 0, 1, 1])]
    single = torch.tensor([True, True, False, False])
    found = normalised(*values, single, levels)
    assert found.divisor.tolist() == pytest.approx([1.00001, 1.00001, 2**0.5 + 1e-5, 2**0.5 + 1e-5])
    biased = normalised(*values, single, replace(levels, unbiased=False))
    assert biased.divisor.tolist() == pytest.approx([1.00001] * 4)


@pytest.mark.parametrize("of_others", [False, True])
def test_equal_values_are_centred_to_exactly_0(of_others):
    values = torch.full((7,), 0.1, dtype=torch.float64), torch.ones(7), torch.zeros(7, dtype=torch.int64)
    single = torch.zeros(7, dtype=torch.bool)
    levels = Levels(mean="group", std="group", of_others=of_others, epsilon=1e-5)
    assert normalised(*values, single, levels).value.tolist() == [0.0] * 7


def test_a_dump_without_options_has_no_error():
    found = findings(DATA / "areal" / "rollout")
    assert not [one for one in found.findings if one.severity.label == "error"]

"""Fixes against TRL's own functions: with the proposed edit in their code, or with rows that have the same effect."""

from dataclasses import replace

import pytest
import torch
from objectives import objective_of
from parity.padded import precision
from parity.real_patches import _Assigned, _edited
from parity.test_trl import laid_out, upstream
from parity.test_trl_generation import WEIGHTS, batch_of, trainer_class, truncated_masked
from parity.trl_generation import scored, weighed

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.table import TRAINERS

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SAMPLING = "sampling/importance_sampling_ratio/"
VLLM = {"use_vllm": True, "beta": 0.0}


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize("seed", range(3))
def test_is_mean_not_sum_as_proposed(mode, seed):
    """The one line of the pull request, in the real function: its weights are those of the fix."""
    batch = batch_of(seed, torch.float64)
    options = {**VLLM, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.1}
    mean = "per_token_logps_diff.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1.0)"
    mine = objective_of("trl", reward_weights=WEIGHTS, **options)
    made = {}
    for edits in ((), (_Assigned("per_sequence_logps_diff", mean),)):
        with precision(torch.float64):
            if edits:
                with _edited("trl", "_generate_and_score_completions", *edits):
                    made["fixed"] = scored(trainer_class("trl"), batch, options, WEIGHTS)[2]
            else:
                made["now"] = scored(trainer_class("trl"), batch, options, WEIGHTS)[2]
    for label, objective in (("now", mine), ("fixed", choose("is-mean-not-sum").apply(mine))):
        own = TRAINERS["trl"].metrics(evaluate(batch, objective, dtype=torch.float64))
        for name in ("mean", "min", "max"):
            assert own[SAMPLING + name] == pytest.approx(made[label][SAMPLING + name], rel=1e-12), (label, name)
    assert made["now"] != made["fixed"]


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_kl_of_rejected_in_the_real_loss(loss_type, on_policy):
    """The KL is multiplied by whether the weight is 0, before it is added."""
    batch = laid_out(random_batch(3, sizes=(4, 4, 4), adjacent=True, spread=0.4, rejected=0.0, empty=0.0), "one")
    if on_policy:
        tokens = {name: x_T for name, x_T in batch.per_token.items() if name != "policy_log_probs"}
        batch = replace(batch, per_token=tokens | {"policy_log_probs": batch.column("old_log_probs")})
    bounds = {"vllm_importance_sampling_clip_max": 1.5, "vllm_importance_sampling_clip_min": 0.5}
    options = {"loss_type": loss_type, "beta": 0.3, "use_vllm": True, "use_bias_correction_kl": False, **bounds}
    mine = objective_of("trl", max_completion_length=40, **options)
    difference = "(ref_per_token_logps - per_token_logps)"
    kept = f"(torch.exp({difference}) - {difference} - 1) * (inputs['importance_sampling_ratio'] != 0)"
    with precision(torch.float64), _edited("trl", "_compute_loss", _Assigned("per_token_kl", kept)):
        loss, grad_T, _ = upstream(trainer_class("trl"), batch, mine, options, torch.float64, on_policy)
    found = evaluate(batch, choose("kl-of-rejected").apply(mine), dtype=torch.float64, per_token=True)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found.per_token.grad_T, grad_T, rtol=1e-12, atol=1e-15)
    assert abs(found.loss - evaluate(batch, mine, dtype=torch.float64).loss) > 1e-3


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_mask_truncated_vote_is_that_of_unscored_rows(scale, seed):
    """TRL leaves rows without any reward out of its statistics: with truncated rows among them it has the fix."""
    options = {"beta": 0.0, "mask_truncated_completions": True, "scale_rewards": scale}
    batch = truncated_masked(batch_of(seed, torch.float64, masks=False))
    cut_N = torch.tensor([status == "length" for status in batch.statuses])
    silent = {name: x_N.masked_fill(cut_N, torch.nan) for name, x_N in batch.rewards.items()}
    with precision(torch.float64):
        outputs, parts, _ = scored(
            trainer_class("trl"), weighed(replace(batch, rewards=silent), WEIGHTS), options, WEIGHTS
        )
    mine = objective_of("trl", reward_weights=WEIGHTS, **options)
    found, before = (
        evaluate(batch, one, dtype=torch.float64).rows.advantage_N
        for one in (choose("mask-truncated-vote").apply(mine), mine)
    )
    for output, part in zip(outputs, parts, strict=True):
        kept_N = ~cut_N[part]
        torch.testing.assert_close(found[part][kept_N], output["advantages"].double()[kept_N], rtol=1e-12, atol=1e-14)
    assert not torch.equal(found[~cut_N], before[~cut_N])


@pytest.mark.parametrize("reward", [0.3, 0.6, 1.0])
def test_exact_equality_std_leaves_the_rounding_of_equal_rewards(reward):
    """The real function gives equal rewards an advantage, and every other row what the fix gives it."""
    batch = random_batch(1, sizes=(8, 8), adjacent=True, empty=0.0, rejected=0.0)
    draw = torch.Generator().manual_seed(2)
    reward_N = torch.cat([torch.full((8,), reward), torch.randn(8, generator=draw)]).double()
    batch = weighed(replace(batch, rewards={"f0": reward_N}, statuses=["stop"] * 16), [1.0])
    outputs, parts, _ = scored(trainer_class("trl"), batch, {"beta": 0.0}, [1.0])
    wanted_N = torch.zeros(16, dtype=torch.float64)
    for output, part in zip(outputs, parts, strict=True):
        wanted_N[part] = output["advantages"].double()
    mine = objective_of("trl", beta=0.0).in_single()
    before, after = (evaluate(batch, one).rows.advantage_N for one in (mine, choose("exact-equality-std").apply(mine)))
    assert torch.equal(before, wanted_N)
    assert (after[:8] == 0).all()
    assert torch.equal(after[8:], wanted_N[8:])
    assert (wanted_N[:8] == 0).all() == (reward == 1.0)

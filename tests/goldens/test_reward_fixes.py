"""Fixes of what a reward reaches, against the code that they change and the changed code: verl 0.8.0, 0.9.1, miles."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from proof.claims import ONLY_DOUBLE, compared

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.search.hypotheses.hypothesis import changing
from rolloutdoctor.search.hypotheses.table import HYPOTHESES
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.table import TRAINERS

STORED = Path(__file__).parent / "data" / "reward_fixes.json"


@cache
def stored():
    return json.loads(STORED.read_text(encoding="utf-8"))


def objective_of(trainer, **options):
    spec = TRAINERS[trainer]
    return spec.objective(resolve(spec.options, (0, 9, 1), [Layer("test", options)], trainer=trainer))


def tool_step(lengths=None):
    """The step with masked spans, as it is in a file; rows may be cut shorter, down to no token."""
    step = stored()["tools"]
    rewards, mask = torch.tensor(step["rewards"], dtype=torch.float64), torch.tensor(step["mask"]).bool()
    lengths_N = torch.tensor(step["lengths"] if lengths is None else lengths)
    kept = torch.arange(mask.shape[1]) < lengths_N[:, None]
    return RolloutBatch(
        step=0,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)]),
        groups=Groups.of(torch.arange(len(mask)) // 4),
        per_row={"reward": rewards.sum(1)},
        per_token={"response_mask": mask[kept]},
        sample_ids=[str(row) for row in range(len(mask))],
        group_ids=[str(row) for row in range(len(mask) // 4)],
    )


@compared("golden", ONLY_DOUBLE)
@pytest.mark.parametrize("gamma", [1.0, 0.97])
def test_tool_spans(gamma):
    """The fix is verl 0.9.1, and what it changes is verl 0.8.0."""
    batch, step = tool_step(), stored()["tools"]
    objective = objective_of("verl", adv_estimator="reinforce_plus_plus", gamma=gamma)
    reset = next(one for one in HYPOTHESES if one.name == "return-reset-at-mask").objective(objective)
    for made, release in ((objective, "0.9.1"), (reset, "0.8.0"), (choose("tool-spans").apply(reset), "0.9.1")):
        found_T = evaluate_rows(batch, made, torch.float64).advantage_T[batch.per_token["response_mask"]]
        wanted_V = torch.tensor(step[release][f"{gamma:g}"], dtype=torch.float64)
        torch.testing.assert_close(found_T, wanted_V, rtol=1e-10, atol=1e-10)


@compared("golden", ONLY_DOUBLE)
@pytest.mark.parametrize(("fix", "name"), [(None, "placed"), ("empty", "empty"), ("pr6310", "pr6310")])
def test_zero_length_reward(fix, name):
    """Every fourth response has no token, and verl's own estimator is given the reward tensors before and after."""
    lengths = [0 if row % 4 == 0 else length for row, length in enumerate(stored()["tools"]["lengths"])]
    batch, objective = tool_step(lengths), objective_of("verl", adv_estimator="grpo")
    made = objective if fix is None else choose(f"zero-length-reward:{fix}").apply(objective)
    wanted_N = torch.tensor(stored()["tools"]["0.9.1"][name], dtype=torch.float64)
    found_N = evaluate_rows(batch, made, torch.float64).advantage_N
    torch.testing.assert_close(found_N, wanted_N, rtol=1e-10, atol=1e-10)
    assert not torch.equal(wanted_N, torch.tensor(stored()["tools"]["0.9.1"]["placed"]).double()) or fix is None


@compared("golden", ONLY_DOUBLE)
@pytest.mark.parametrize("scaled", [True, False])
def test_one_vote_per_rollout(scaled):
    """The fix on slime, whose fork miles is, gives the advantages of miles, of 1 to 6 rollouts of 1 to 4 rows."""
    (step,) = (one for one in stored()["votes"] if one["scaled"] is scaled)
    count = len(step["group"])
    batch = RolloutBatch(
        step=0,
        rows=torch.arange(count + 1),
        groups=Groups.of(torch.tensor(step["group"])),
        per_row={"reward": torch.tensor(step["reward"]).double(), "trajectory_id": torch.tensor(step["trajectory"])},
        per_token={"response_mask": torch.ones(count, dtype=torch.bool)},
        sample_ids=[str(row) for row in range(count)],
        group_ids=[str(group) for group in range(6)],
    )
    objective = objective_of("slime", grpo_std_normalization=scaled)
    plain = changing("advantage", batch_if_unequal=False)(objective)
    fixed = choose("one-vote-per-rollout").apply(objective)
    wanted_N = torch.tensor(step["advantage"], dtype=torch.float64)
    # miles rounds to float32, and a group of one rollout has 0.
    torch.testing.assert_close(evaluate_rows(batch, fixed, torch.float64).advantage_N, wanted_N, rtol=1e-6, atol=1e-6)
    assert (evaluate_rows(batch, plain, torch.float64).advantage_N - wanted_N).abs().max() > 0.05
    other = replace(batch, per_row={**batch.per_row, "trajectory_id": torch.arange(count)})
    torch.testing.assert_close(
        evaluate_rows(other, fixed, torch.float64).advantage_N, evaluate_rows(batch, plain, torch.float64).advantage_N
    )

import math
from dataclasses import replace

import pytest
import torch

from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.testing import diagnose, diagnose_one, random_batch, toy_batch


def test_toy_batch():
    batch = toy_batch(
        [[1, math.nan], [0]],
        mask=[[1, 0], [], [1]],
        policy=[[-1, -2], [], [-3]],
        ref=-1.5,
        per_row={"rank": [0, 0, 1]},
        per_token={"response_mask_pre": 1},
        step=4,
        split="eval",
    )
    assert batch.key == (4, "eval")
    assert batch.rows.tolist() == [0, 2, 2, 3]
    assert batch.groups.index_N.tolist() == [0, 0, 1]
    assert batch.per_token["policy_log_probs"].tolist() == [-1.0, -2.0, -3.0]
    assert batch.per_token["ref_log_probs"].tolist() == [-1.5] * 3
    assert batch.per_token["response_mask"].tolist() == [True, False, True]
    assert batch.per_token["response_mask_pre"].tolist() == [True] * 3
    assert batch.per_row["rank"].tolist() == [0, 0, 1]
    assert batch.per_row["reward"].isnan().tolist() == [False, True, False]
    assert (list(batch.group_ids), list(batch.sample_ids)) == (["g0", "g1"], ["r0", "r1", "r2"])
    assert not batch.has("values")
    assert not toy_batch([[1]], policy=None).has("policy_log_probs")


def test_random_batch_is_the_same_for_the_same_seed():
    one, same, other = (random_batch(seed) for seed in (1, 1, 2))
    for name, column in one.per_token.items():
        assert torch.equal(column, same.per_token[name])
    assert not torch.equal(one.per_row["reward"], other.per_row["reward"])


def test_random_batch():
    batch = random_batch(3, sizes=(50, 50), binary=True, rejected=0.5, holes=0.5, empty=0.3, dtype=torch.float64)
    assert batch.groups.size_G.tolist() == [50, 50]
    assert set(batch.per_row["reward"].tolist()) == {0.0, 1.0}
    assert batch.per_token["values"].dtype == torch.float64
    lengths_N = batch.rows.diff()
    assert 0.1 < float((lengths_N == 0).double().mean()) < 0.5
    mask_T, before_T = batch.per_token["response_mask"], batch.per_token["response_mask_pre"]
    assert not (mask_T & ~before_T).any()
    assert bool((before_T & ~mask_T).any())
    assert batch.groups.index_N.tolist() != sorted(batch.groups.index_N.tolist())
    adjacent = random_batch(3, sizes=(3, 4), adjacent=True)
    assert adjacent.groups.index_N.tolist() == [0] * 3 + [1] * 4


def test_diagnose():
    batches = [toy_batch([[1, 1], [1, 0]], ref=-1.5, step=1), toy_batch([[1]], ref=-1.5, split="eval")]
    report = diagnose(batches, trainer="trl", options={"beta": 0.1}, select=["RDG001", "RDM002"])
    assert [finding.code for finding in report.findings] == ["RDG001", "RDM002"]
    assert (report.trainer, report.input.steps) == ("trl", 2)
    # metrics belong to training steps
    logged = {"frac_reward_zero_std": 1.0}
    (finding,) = diagnose(batches, trainer="trl", logged=logged, select=["RDM002"]).findings
    assert finding.verdict == "exposed"


def test_diagnose_one():
    batch = toy_batch([[1, 1], [1, 0]], ref=-1.5)
    assert diagnose_one("RDG001", batch, trainer="trl", beta=0.1) == "RDG001 info exposed: groups_share 0.5"
    assert diagnose_one("RDG001", batch, trainer="trl") == (
        "RDG001 not applicable: beta = 0.0: there is no KL term in the loss"
    )
    assert diagnose_one("RDG001", batch, trainer="trl", beta=0) == (
        "RDG001 not applicable: beta = 0.0: there is no KL term in the loss"
    )
    assert diagnose_one("RDG001", toy_batch([[1, 1]]), trainer="trl", beta=0.1) == (
        "RDG001 skipped: missing column ref_log_probs"
    )
    nothing = toy_batch([[0]], split="train")
    assert diagnose_one("RDA002", nothing, trainer="trl") == "RDA002 info exposed: groups 1"
    with pytest.raises(UsageError, match="no rule"):
        diagnose_one("RDX001", batch, trainer="trl")


def test_diagnose_passes_rewards_by_function():
    parts = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in (("a", [1, 1, 0, 1]), ("b", [2, 2, 5, 5]))
    }
    batch = replace(toy_batch([[3, 3], [5, 6]], ref=-1.5), rewards=parts)
    options = {"beta": 0.1, "multi_objective_aggregation": "normalize_then_sum"}
    report = diagnose([batch], trainer="trl", options=options, select=["RDG001"])
    assert not report.skipped
    # Only the first group has equal rewards in both functions.
    assert report.findings[0].measures["groups_share"].value == 0.5
    without = diagnose([replace(batch, rewards={})], trainer="trl", options=options, select=["RDG001"])
    assert "rewards" in without.skipped[0].reason

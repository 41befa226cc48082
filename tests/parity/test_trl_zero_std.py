"""TRL's own zero-std flag, row by row as its real functions make it: what `zero-std:pr5640` masks, and its metric."""

from dataclasses import replace

import pytest
import torch
from parity.test_trl_generation import objective, trainer_class
from parity.trl_generation import generated, scored, weighed
from proof.claims import compared

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.rows import std_flagged
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

SCALES = {
    "group": {"scale_rewards": "group"},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "normalize_then_sum": {"multi_objective_aggregation": "normalize_then_sum"},
}
REWARDS = {
    "flat, one reward of its own": [0.3, 0.5, 1.1, 1.0],
    "flat, all alike": [1.0] * 4,
    "flat, all alike and fractional": [1.1] * 4,
    "one group differs": [0.3, 0.5, 1.1, None],
    "one group unscored": [0.3, 0.5, 1.0, float("nan")],
    "one scored row": [float("nan")] * 4,
    "nothing scored": [float("nan")] * 4,
}


def batch_of(case: str, size: int, split: str) -> RolloutBatch:
    """Twelve rows in groups of one size; the two reward functions give the same."""
    groups = 12 // size
    batch = random_batch(1, sizes=(size,) * groups, adjacent=True, empty=0.0, rejected=0.0)
    values = [REWARDS[case][group % 4] for group in range(groups) for _ in range(size)]
    values = [float(row) if value is None else value for row, value in enumerate(values)]
    if case == "one scored row":
        values[size - 1] = 2.0
    batch = replace(generated(batch, 1), split=split)
    reward_N = torch.tensor(values, dtype=torch.float64).float().double()
    batch = replace(batch, rewards={"f0": reward_N, "f1": reward_N})
    if split == "eval":
        cut = {"micro_batch_id": torch.tensor([0] * 4 + [1] * 4 + [2] * 4)}
        batch = replace(batch, per_row={**batch.per_row, **cut}, groups=Groups.of(torch.arange(12) // size))
    return weighed(batch, [1.0, 1.0])


def flagged(trainer: str, batch: RolloutBatch, options: dict, monkeypatch) -> tuple[torch.Tensor, float]:
    """The flag of every row and its mean, as the real function makes them."""
    seen, isclose = [], torch.isclose

    def recorded(*args, **kwargs):
        seen.append(isclose(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(torch, "isclose", recorded)
    _, parts, metrics = scored(trainer_class(trainer), batch, options, [1.0, 1.0])
    monkeypatch.undo()
    # Every call is made twice; ranks are told each other's rewards in between.
    flags = torch.zeros(len(batch), dtype=torch.bool)
    for part, found in zip(parts, seen[1::2], strict=True):
        each = found.repeat_interleave(int(part.sum()) // len(found))
        flags[part] = each
    return flags, metrics["frac_reward_zero_std"]


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", REWARDS)
@pytest.mark.parametrize("scale", SCALES)
def test_rows_of_the_proposed_mask(scale, case, size, split, monkeypatch):
    batch = batch_of(case, size, split)
    options = {"beta": 0.1, "num_generations_eval": size, **SCALES[scale]}
    wanted_N, share = flagged("trl", batch, options, monkeypatch)
    mine = objective("trl", reward_weights=[1.0, 1.0], **options)
    found = evaluate(batch, mine)
    assert std_flagged(batch, found.rows).tolist() == wanted_N.tolist()
    assert table.TRAINERS["trl"].metrics(found)["frac_reward_zero_std"] == pytest.approx(share)
    fixed = evaluate(batch, choose("zero-std:pr5640").apply(mine))
    for scope in (fixed.objective.policy, fixed.objective.kl, fixed.objective.metric):
        assert (~fixed.in_scope(scope)).tolist() == wanted_N.tolist()


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", REWARDS)
def test_metric_of_rloo(case, size, split, monkeypatch):
    batch = batch_of(case, size, split)
    options = {"beta": 0.0, "num_generations_eval": size}
    _, share = flagged("trl-rloo", batch, options, monkeypatch)
    found = evaluate(batch, objective("trl-rloo", reward_weights=[1.0, 1.0], **options))
    assert table.TRAINERS["trl-rloo"].metrics(found)["frac_reward_zero_std"] == pytest.approx(share)

"""Dumps without options, whose advantages are right under some estimator of their trainer: no advantage is wrong."""

import json
import sys

import pytest
import torch
from importers.importing import findings

REWARD_GK = torch.tensor([[0.3, -1.0, 0.8, 0.1], [1.5, 0.2, -0.4, 0.9], [0.0, 0.7, 0.6, -2.0], [1.1, 1.2, -0.3, 0.4]])
CENTRED_GK = REWARD_GK - REWARD_GK.mean(1, keepdim=True)
OTHERS_GK = CENTRED_GK * 4 / 3
STD_G1 = REWARD_GK.std(1, keepdim=True)

ADVANTAGES = {
    "grpo": CENTRED_GK / (STD_G1 + 1e-4),
    "grpo, batch": CENTRED_GK / (REWARD_GK.std() + 1e-4),
    "grpo, none": CENTRED_GK,
    "rloo": OTHERS_GK,
    "rloo, group": OTHERS_GK / (STD_G1 + 1e-4),
    "rloo, batch": OTHERS_GK / (REWARD_GK.std() + 1e-4),
    "reinforce_plus_plus": CENTRED_GK / (CENTRED_GK.std() + 1e-4),
    "of penalised rewards": CENTRED_GK + 0.01 * torch.arange(16).view(4, 4),
}


def swift(folder, advantage_GK):
    table = {
        "step": ["1"] * 16,
        "prompt": [f"question {row // 4}" for row in range(16)],
        "completion": [f"answer {row}" for row in range(16)],
        "accuracy": REWARD_GK.flatten().tolist(),
        "advantages": advantage_GK.flatten().tolist(),
    }
    (folder / "completions.jsonl").write_text(json.dumps(table) + "\n")


def prime(folder, advantage_GK):
    place = folder / "rollouts" / "step_1" / "train" / "effective"
    place.mkdir(parents=True)
    lines = []
    for row, (reward, advantage) in enumerate(zip(REWARD_GK.flatten(), advantage_GK.flatten(), strict=True)):
        nodes = [
            {"token_ids": [5, row // 4], "mask": [False] * 2, "logprobs": []},
            {"parent": 0, "token_ids": [7, 8], "mask": [True] * 2, "logprobs": [-0.5, -0.2]},
        ]
        nodes[1]["advantages"] = [float(advantage)] * 2
        trace = {"id": str(row), "nodes": nodes, "rewards": {"f": {"score": float(reward), "weight": 1.0}}}
        run = {"id": "run", "work": {"policy": {"start": 0, "end": 0}}}
        lines.append(json.dumps({"task": {}, "group": {"id": str(row // 4)}, "run": run, "traces": [trace]}))
    (place / "traces.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("write", [swift, prime])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_estimator_is_an_error(write, name, tmp_path):
    write(tmp_path, ADVANTAGES[name])
    assert "RDA004" not in {one.code for one in findings(tmp_path).findings}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("write", [swift, prime])
def test_a_penalty_in_the_reward_is_no_residue_and_no_blow_up(write, tmp_path, monkeypatch):
    """Equal rewards whose advantages a penalty moves, and one far beyond the largest z-score of its group."""
    reward_GK = REWARD_GK.clone()
    reward_GK[1] = 0.3
    monkeypatch.setattr(sys.modules[__name__], "REWARD_GK", reward_GK)
    advantage_GK = (reward_GK - reward_GK.mean(1, keepdim=True)) / (reward_GK.std(1, keepdim=True) + 1e-4)
    advantage_GK += 0.3 * torch.tensor([0.1, -0.2, 0.05, 0.05])
    advantage_GK[2, 0] = 40.0
    write(tmp_path, advantage_GK)
    assert not [one.code for one in findings(tmp_path).findings if one.severity.label == "error"]

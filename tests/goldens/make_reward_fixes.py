"""Make `data/reward_fixes.json`: ``python tests/goldens/make_reward_fixes.py VERL_0_8_0 VERL_0_9_1 MILES``.

The first two are folders that hold the package verl of these releases, the third is a checkout of radixark/miles of
31f1ca961a94, of which two functions are taken out of ``miles/ray/rollout/train_data_conversion.py``.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from goldens.processor import note

RETURNS = """
import json, sys
import torch
from verl.trainer.ppo import core_algos
step = json.load(sys.stdin)
rewards, mask = (torch.tensor(step[name], dtype=torch.float64) for name in ("rewards", "mask"))
found = {}
for gamma in (1.0, 0.97):
    config = type("Config", (), {"gamma": gamma})()
    value = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)[0]
    found[f"{gamma:g}"] = value[mask.bool()].tolist()
# Rewards as the reward managers place them: of a response without a token at index -1; as they would by the fix; and
# with the mask in the sum. Every fourth response is empty here.
lengths = torch.tensor(step["lengths"])
lengths[::4] = 0
placed = torch.zeros_like(rewards)
for row, length in enumerate(lengths.tolist()):
    placed[row, length - 1] = rewards[row].sum()
index, inside = [row // 4 for row in range(len(rewards))], torch.arange(rewards.shape[1]) < lengths[:, None]
for name, each in {"placed": placed, "empty": placed * inside, "pr6310": placed * (mask * inside)}.items():
    value = core_algos.compute_grpo_outcome_advantage(each, torch.ones_like(each), index, config=config)[0]
    found[name] = value[:, 0].tolist()
print(json.dumps(found))
"""


def returns_of(package: Path, step: dict[str, Any]) -> dict[str, list[float]]:
    """Advantages of the trained tokens, by discount."""
    made = subprocess.run(
        [sys.executable, "-c", RETURNS], input=json.dumps(step), env={"PYTHONPATH": str(package)},
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    return json.loads(made.stdout.splitlines()[-1])


def tools(rows: int = 12, longest: int = 14) -> dict[str, Any]:
    """Padded rewards of token and mask: spans of masked tokens within, and at the end of some."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (rows,), generator=draw)
    inside = torch.arange(longest) < lengths[:, None]
    mask = inside & (torch.rand(rows, longest, generator=draw) < 0.7)
    mask[:, 0] = True
    rewards = torch.zeros(rows, longest, dtype=torch.float64)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(-3, 6, (rows,), generator=draw).double() / 4
    return {"lengths": lengths.tolist(), "rewards": rewards.tolist(), "mask": mask.long().tolist()}


def votes(checkout: Path) -> list[dict[str, Any]]:
    """Rewards of segments as miles normalises them, with and without the standard deviation."""
    source = (checkout / "miles/ray/rollout/train_data_conversion.py").read_text()
    wanted = {"_reward_group_segments", "_normalize_rewards_by_rollout"}
    body = [node for node in ast.parse(source).body if getattr(node, "name", None) in wanted]
    scope: dict[str, Any] = {"torch": torch, "Any": Any, "Sample": object}
    exec(compile(ast.Module(body, []), "miles", "exec"), scope)  # the two functions as they are
    draw = torch.Generator().manual_seed(2)
    groups, rollouts, rewards = [], [], []
    for group in range(6):
        for _ in range(1 + group):
            rollout, segments = 1 + len(set(rollouts)), int(torch.randint(1, 5, (), generator=draw))
            reward = float(torch.randint(0, 5, (), generator=draw)) / 4
            groups, rollouts, rewards = (
                each + [value] * segments for each, value in ((groups, group), (rollouts, rollout), (rewards, reward))
            )
    samples = [
        SimpleNamespace(group_index=group, rollout_id=rollout, index=None)
        for group, rollout in zip(groups, rollouts, strict=True)
    ]
    found = []
    for scaled in (True, False):
        args = SimpleNamespace(advantage_estimator="grpo", grpo_std_normalization=scaled)
        made = scope["_normalize_rewards_by_rollout"](args, samples, rewards, None)
        found.append({"scaled": scaled, "group": groups, "trajectory": rollouts, "reward": rewards, "advantage": made})
    return found


if __name__ == "__main__":
    old, new, miles = map(Path, sys.argv[1:])
    step = tools()
    made = {"tools": step | {"0.8.0": returns_of(old, step), "0.9.1": returns_of(new, step)}, "votes": votes(miles)}
    path = Path(__file__).parent / "data" / "reward_fixes.json"
    path.write_text(json.dumps(made) + "\n")
    note(path)

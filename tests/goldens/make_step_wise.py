"""Make `data/step_wise.json`: ``python tests/goldens/make_step_wise.py BEFORE AFTER``.

Each is a checkout of NovaSky-AI/SkyRL: the parent of 76b718782 (pull request 1507), and that commit. Advantages are
those of its ``RayPPOTrainer.compute_advantages_and_returns`` (skyrl/train/trainer.py) with the function
``compute_grpo_outcome_advantage`` of ppo_utils.py in skyrl/backends/skyrl_train/utils, of rows that end together, as
``convert_prompts_responses_to_batch_tensors`` aligns them.
"""

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from goldens.processor import note

DATA = Path(__file__).parent / "data" / "step_wise.json"
STEPS, TASKS, GROUP = 3, 4, 4


def function(path: Path, name: str, scope: dict[str, Any]) -> Any:
    """A function or method of a source, without its decorators and annotations."""
    found = next(
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    found.decorator_list, found.returns = [], None
    for argument in (*found.args.args, *found.args.kwonlyargs):
        argument.annotation = None
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    return scope[name]


class Batch(dict):
    """A batch of tensors with what is known of it."""

    def to(self, device: str) -> "Batch":
        return self


def drawn() -> list[list[dict[str, Any]]]:
    """Rows of some steps: trajectories of one to four turns of unequal lengths."""
    draw, steps = np.random.default_rng(5), []
    for _ in range(STEPS):
        rows = []
        for trajectory in range(TASKS * GROUP):
            turns, reward = int(draw.integers(1, 5)), float(draw.integers(2))
            lengths = draw.integers(2, 12, turns).tolist()
            rows += [
                {"trajectory_id": trajectory, "group_id": str(trajectory // GROUP), "reward": reward, "tokens": length}
                for length in lengths
            ]
            rows[-1]["is_last"] = True
        steps.append(rows)
    return steps


def advantages_of(checkout: Path, rows: list[dict[str, Any]]) -> list[list[float]]:
    """What SkyRL's trainer makes of the rows of a step."""
    grpo = function(
        checkout / "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        "compute_grpo_outcome_advantage",
        {"torch": torch, "np": np, "defaultdict": defaultdict},
    )

    def estimated(token_level_rewards, response_mask, index, grpo_norm_by_std, **others):
        return grpo(token_level_rewards, response_mask, index, grpo_norm_by_std=grpo_norm_by_std)

    algorithm = SimpleNamespace(advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=True)
    trainer = SimpleNamespace(
        cfg=SimpleNamespace(
            generator=SimpleNamespace(step_wise_trajectories=True), trainer=SimpleNamespace(algorithm=algorithm)
        ),
        all_metrics={},
    )
    width, is_last = max(row["tokens"] for row in rows), ["is_last" in row for row in rows]
    places = torch.arange(width)[None] >= width - torch.tensor([row["tokens"] for row in rows])[:, None]
    rewards = torch.zeros(len(rows), width)
    rewards[:, -1] = torch.tensor([row["reward"] for row in rows])
    batch = Batch(rewards=rewards, response_mask=places.float(), values=None, is_last_step=torch.tensor(is_last))
    batch.metadata = {"uids": [row["group_id"] for row in rows], "is_last_step": is_last, "avg_response_length": 1.0}
    scope = {
        "torch": torch,
        "np": np,
        "ppo_utils": SimpleNamespace(compute_advantages_and_returns=estimated),
        "logger": SimpleNamespace(info=lambda text: None),
    }
    function(checkout / "skyrl/train/trainer.py", "compute_advantages_and_returns", scope)(trainer, batch)
    return [batch["advantages"][row, here].tolist() for row, here in enumerate(places)]


def main(before: Path, after: Path) -> None:
    """Write the rows, and what either makes of them."""
    steps = drawn()
    found = {
        name: [advantages_of(path, rows) for rows in steps] for name, path in (("before", before), ("after", after))
    }
    DATA.write_text(json.dumps({"rows": steps, **found}) + "\n")
    note(DATA)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

"""Make `data/swift_rewards.json`: ``python tests/goldens/make_swift_rewards.py SWIFT_4_5_3 SWIFT_4_6_0``.

Each is the unpacked wheel of ms-swift of that release. What is logged of each reward function at a generation batch is
made by the trainer's own statements: ``nanmean`` and ``nanstd`` in ``log_rewards_metrics`` before 4.6.0, and
``compute_reward_metrics`` from then on, which leaves functions out.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "real" / "make"))

import torch
import upstream
from goldens.processor import note

DATA = Path(__file__).parent / "data" / "swift_rewards.json"
NAMES = ("every", "some", "one", "none", "late")
NONE = float("nan")
BATCHES = (
    [[1, 1, NONE, NONE, NONE], [0.5, NONE, NONE, NONE, NONE], [0, 3, 2, NONE, NONE], [0.25, 0.5, NONE, NONE, NONE]],
    [[0, NONE, NONE, NONE, 1], [0.5, 1, NONE, NONE, 0], [1, NONE, 4, NONE, NONE], [0.75, 0.5, NONE, NONE, NONE]],
)
"""Two generation batches: a line a response, a column a function."""


def of_each(root: Path) -> list[dict[str, float]]:
    """Metrics of each generation batch."""
    typing: dict[str, Any] = {"torch": torch, "dataclass": dataclass}
    upstream.load(root / "swift/utils/torch_utils.py", ["nanstd"], typing)
    upstream.load(root / "swift/rl_core/advantage.py", ["RewardMetrics", "compute_reward_metrics"], typing)
    trainer = (root / "swift/rlhf_trainers/grpo_trainer.py").read_text()
    whole = "torch.nanmean(col).item()" in trainer
    found = []
    for batch in BATCHES:
        columns = torch.tensor(batch, dtype=torch.float32)
        if whole:
            each = {name: columns[:, place] for place, name in enumerate(NAMES)}
            mean = {name: torch.nanmean(col).item() for name, col in each.items()}
            std = {name: typing["nanstd"](col).item() for name, col in each.items()}
        else:
            made = typing["compute_reward_metrics"](columns.nansum(1), columns, list(NAMES), 2, "group")
            mean, std = made.per_func_mean, made.per_func_std
        found.append({f"rewards/{name}/mean": x for name, x in mean.items()})
        found[-1] |= {f"rewards/{name}/std": x for name, x in std.items()}
    return found


def main(before: Path, after: Path) -> None:
    results = {"4.5.3": of_each(before), "4.6.0": of_each(after)}
    DATA.write_text(json.dumps({"names": NAMES, "batches": BATCHES, "results": results}, indent=1) + "\n")
    note(DATA)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))

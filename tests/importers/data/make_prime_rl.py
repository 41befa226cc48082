"""Make `prime_rl/`: token exports that `TokenExporter` of prime-rl wrote, and traces built to the documented layout.

    python tests/importers/data/make_prime_rl.py CHECKOUT

CHECKOUT is a clone of PrimeIntellect-ai/prime-rl at 559b44772. The exporter (src/prime_rl/trainer/rl/token_export.py)
is the real one, with stand-ins for the configuration classes and the loss that it imports; the micro-batches are
random, packed and padded as the trainer packs them. The traces were NOT written by prime-rl: they follow
`FileMonitor.log_episodes` (src/prime_rl/monitors/file.py) and `Episode.to_record` of verifiers a60a606e.
"""

import json
import random
import shutil
import sys
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).parent / "prime_rl"


def micro_batch(seed):
    """Two sequences, and a padding tail on the second."""
    draw = torch.Generator().manual_seed(seed)
    lengths = [7, 8]
    mask = torch.tensor([0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 0], dtype=torch.bool)
    total = sum(lengths)
    sampled = -torch.rand(total, generator=draw) * mask
    batch = {
        "input_ids": torch.randint(3, 90, (1, total), generator=draw),
        "position_ids": torch.arange(total)[None],
        "loss_mask": mask[None],
        "advantages": torch.where(mask, 0.5, 0.0)[None],
        "inference_logprobs": sampled[None],
        "env_names": ["gsm8k"] * 12 + [""] * 3,
    }
    logprobs = sampled + 0.01
    logprobs[0] = -10.0
    entropy = torch.rand(total, generator=draw)
    entropy[4] = torch.inf  # what is not finite is written as null
    return batch, {"logprobs": logprobs[None], "entropy": entropy[None]}, lengths


def make_exports():
    from prime_rl.trainer.rl.token_export import TokenExporter

    for rank in (0, 1):
        exporter = TokenExporter(HERE, rank)
        for step in (1, 2, 3):
            for micro_step in (0, 1):
                exporter.export(step, micro_step, *micro_batch(100 * step + 10 * rank + micro_step), None)
            if rank == 1 and step < 3:
                exporter.mark_stable()


def episode(draw, step, group, kind, *, dispatched):
    sampled = [draw.randrange(20, 90) for _ in range(draw.randrange(1, 5))]
    reward = float(draw.random() < 0.5)
    nodes = [
        {
            "message": {"role": "user", "content": f"question {group}"},
            "sampled": False,
            "timestamp": 1.0,
            "token_ids": [5, 6, group],
            "mask": [False] * 3,
            "is_content": [],
            "logprobs": [],
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "answer"},
            "sampled": True,
            "timestamp": 2.0,
            "token_ids": [7, *sampled],
            "mask": [False] + [True] * len(sampled),
            "is_content": [],
            "logprobs": [-draw.random() for _ in sampled],
        },
    ]
    if kind == "train":
        nodes[1]["advantages"] = [reward - 0.5] * len(sampled)
    trace = {
        "version": 1,
        "id": f"{draw.getrandbits(64):016x}",
        "agent": {"name": "agent", "trainable": True},
        "nodes": nodes,
        "rewards": {"correct": {"score": reward, "weight": 1.0}, "short": {"score": 0.5, "weight": 0.5}},
        "metrics": {},
        "info": {"advantage": reward - 0.5} if kind == "train" else {},
        "is_completed": True,
        "ok": True,
        "stop_condition": "agent_completed",
        "errors": [],
    }
    work = {"type": kind, "step": dispatched, "policy": {"start": dispatched - 1, "end": step - 1}}
    return {
        "id": f"{draw.getrandbits(64):016x}",
        "env": {"id": "gsm8k", "name": "gsm8k"},
        "task": {"data": {"idx": group}},
        "group": {"id": f"{step}-{group}"},
        "run": {"type": "train", "id": "run", "work": work},
        "ok": True,
        "errors": [],
        "traces": [trace],
    }


def make_traces():
    draw = random.Random(0)
    for step in (1, 2):
        for kind in ("train", "eval")[: 3 - step]:
            episodes = [
                episode(draw, step, group, kind, dispatched=max(1, step - 1)) for group in range(3) for _ in range(4)
            ]
            rejected = [episode(draw, step, 9, kind, dispatched=step) for _ in range(4)]
            for subset, rows in (("all", episodes + rejected), ("effective", episodes)):
                folder = HERE / "rollouts" / f"step_{step}" / kind / subset
                folder.mkdir(parents=True)
                (folder / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    from stubs import stub

    stub("prime_rl.configs")
    package = ModuleType("prime_rl")
    package.__path__ = [f"{sys.argv[1]}/src/prime_rl"]
    loss = ModuleType("prime_rl.trainer.rl.loss")
    loss.compute_importance_ratio_and_mismatch_kl = lambda one, other: (
        one - other,
        torch.exp(one - other),
        torch.exp(one - other) - (one - other) - 1,
    )
    for name in ("prime_rl.trainer", "prime_rl.trainer.rl"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [f"{sys.argv[1]}/src/{name.replace('.', '/')}"]
    sys.modules |= {"prime_rl": package, "prime_rl.trainer.rl.loss": loss}
    import prime_rl.configs.trainer

    prime_rl.configs.trainer.DefaultLossConfig = type("DefaultLossConfig", (), {})
    shutil.rmtree(HERE, ignore_errors=True)
    make_exports()
    make_traces()

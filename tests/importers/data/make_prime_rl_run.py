"""Make `prime_rl_runs.parquet`: rows and metrics of runs whose numbers prime-rl's own functions made.

    python tests/importers/data/make_prime_rl_run.py CHECKOUTS

CHECKOUTS is that of tests/goldens/make_prime_rl.py, whose functions run a step: advantages, the filter of zero
advantages, loss and metrics are prime-rl's, of 559b44772. `importing.prime_rl_output` writes a run as prime-rl does.
"""

import json
import random
import sys
from pathlib import Path

import polars as pl
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[1] / "goldens")]

import make_prime_rl  # noqa: E402
from prime_rl_cases import single  # noqa: E402

RUNS = {"healthy": (0.0, 1.0), "residue": (0.0, 0.7, 1.0)}


def step_of(draw, rewards):
    rows = []
    for group in range(4):
        kind = draw.random()
        for _ in range(8):
            reward = rewards[1] if len(rewards) == 3 and group < 2 else draw.choice((0.0, 1.0)) if kind < 0.8 else 1.0
            length = draw.randrange(4, 16)
            mask = [draw.random() < 0.9 for _ in range(length)]
            mask[0] = mask[-1] = True
            # A token is drawn as often as its log-prob says: the mean of -log p is the entropy.
            entropy = [single(draw.uniform(0.2, 1.0)) for _ in mask]
            policy = [single(-each * draw.expovariate(1.0) - 1e-4) for each in entropy]
            rows.append(
                {
                    "group": group,
                    "agent": 0,
                    "reward": reward,
                    "mask": mask,
                    "policy": policy,
                    "sampler": [single(min(p + draw.gauss(0, 0.02), -1e-6)) for p in policy],
                    "entropy": entropy,
                    "ids": [draw.randrange(20, 90) for _ in mask],
                    "rank": len(rows) % 2,
                    "micro": len(rows) // 2 % 2,
                }
            )
    return rows


def main(checkouts):
    make_prime_rl.prepare(Path(checkouts) / "HEAD", "HEAD")
    found = []
    for name, rewards in RUNS.items():
        draw = random.Random(name)
        for step in range(1, 7):
            rows = step_of(draw, rewards)
            advantage, _, _, metrics = make_prime_rl.run("HEAD", {}, "grpo", rows, torch.float32)
            metrics = {key.replace("entropy/", "entropy/all/"): value for key, value in metrics.items()}
            metrics["kl_ent_ratio/mean"] = metrics["mismatch_kl/all/mean"] / metrics["entropy/all/mean"]
            for row, value in zip(rows, advantage, strict=True):
                found.append({"run": name, "step": step, "advantage": value, "metrics": json.dumps(metrics), **row})
    pl.DataFrame(found).write_parquet(HERE / "prime_rl_runs.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main(sys.argv[1])

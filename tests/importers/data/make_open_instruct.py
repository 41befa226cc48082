"""Make `open_instruct/`: rollouts that `_save_rollouts` and `save_rollout_metadata` of open-instruct wrote.

    python tests/importers/data/make_open_instruct.py CHECKOUT

CHECKOUT is a clone of allenai/open-instruct at e6c3044aa. The writer (open_instruct/rl_utils.py) and its data types are
the real ones; what they import besides has stand-ins. The batch is random; the run resumes from its checkpoint after
the step that it records as 1.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent / "open_instruct"
PROMPTS, SIZE = 3, 4


def save(step, seed, shard=0):
    from open_instruct import data_types, rl_utils

    draw = np.random.default_rng(seed)
    rows = PROMPTS * SIZE
    responses = [draw.integers(20, 90, draw.integers(1, 6)).tolist() for _ in range(rows)]
    scores = draw.integers(0, 2, rows).astype(float)
    batch = SimpleNamespace(
        queries=[[5, 6, 7 + row // SIZE] for row in range(rows)],
        scores=scores.tolist(),
        ground_truths=[[1]] * rows,
        datasets=["math"] * rows,
    )
    result = data_types.GenerationResult(
        responses=responses,
        finish_reasons=["length" if row == 1 else "stop" for row in range(rows)],
        masks=[[1] * len(each) for each in responses],
        request_info=None,
        index=0,
        prompt_id=None,
        logprobs=[[-0.5] * (len(each) - 1) + [float("nan")] for each in responses],
    )
    grouped = scores.reshape(-1, SIZE)
    advantages = ((grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, keepdims=True) + 1e-8)).reshape(-1)
    rl_utils._save_rollouts(str(HERE), "run", step, batch, result, advantages, SIZE, shard)


if __name__ == "__main__":
    from stubs import stub

    sys.path.insert(0, sys.argv[1])
    stub("open_instruct.logger_utils", "open_instruct.model_utils", "open_instruct.utils")
    from open_instruct import rl_utils

    for old in HERE.glob("*.jsonl"):
        old.unlink()
    rl_utils.utils.get_git_commit = lambda: "e6c3044aa"
    rl_utils.save_rollout_metadata(str(HERE), "run", "model")
    for step in (0, 1, 2):
        save(step, seed=step, shard=int(step == 2))
    # Resumed after step 1: the count of samples begins again, so step 2 goes to the first file.
    save(2, seed=9)

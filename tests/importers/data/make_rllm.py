"""Make `rllm/`: episodes that `EpisodeLogger` of rllm wrote.

    python tests/importers/data/make_rllm.py CHECKOUT

CHECKOUT is a clone of rllm-org/rllm at 9beb6e0f. The logger (rllm/utils/episode_logger.py) is the real one; episodes
are random.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent / "rllm"
TASKS, SIZE = 3, 4


def episode(draw, task, number):
    right = draw.random() < 0.5
    step = SimpleNamespace(
        observation="2 + 2?",
        thought="",
        action="4",
        reward=float(right),
        done=True,
        model_response="4" if right else "5",
        chat_completions=[{"role": "user", "content": "2 + 2?"}],
        info={},
    )
    solver = SimpleNamespace(name="solver", uid=f"{task}-{number}", reward=float(right), steps=[step], info={})
    return SimpleNamespace(
        id=f"{task}:{number}",
        session_id=None,
        task={"question": task},
        is_correct=right,
        termination_reason=SimpleNamespace(value="env_done"),
        metrics={},
        metadata={},
        info={},
        trajectories=[solver],
    )


if __name__ == "__main__":
    from stubs import stub

    sys.path.insert(0, sys.argv[1])
    stub("rllm.types")
    sys.modules["rllm"] = type(sys)("rllm")
    sys.modules["rllm"].__path__ = [f"{sys.argv[1]}/rllm"]
    sys.modules["rllm.utils"] = type(sys)("rllm.utils")
    sys.modules["rllm.utils"].__path__ = [f"{sys.argv[1]}/rllm/utils"]
    from rllm.utils.episode_logger import EpisodeLogger

    draw = random.Random(0)
    logger = EpisodeLogger(str(HERE))
    for step in (1, 2, 3):
        batch = [episode(draw, f"task{task}", number) for task in range(TASKS) for number in range(SIZE)]
        logger.log_episodes_batch(batch, step, "train")
    logger.log_episodes_batch([episode(draw, "task9", 0)], 3, "val")

"""Make `tinker_cookbook/`: rollout summaries and metrics that tinker-cookbook's own functions wrote.

    python tests/importers/data/make_tinker_cookbook.py CHECKOUT

CHECKOUT is a clone of thinking-machines-lab/tinker-cookbook at 9dfcc3a2. The serializer (rl/rollout_logging.py), the
store (stores/training_store.py) and the JSON logger (utils/ml_log.py) are the real ones; trajectories are random, and
what these modules import besides has stand-ins.
"""

import random
import sys
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent / "tinker_cookbook"
GROUPS, SIZE = 3, 4


def group(draw):
    def trajectory():
        tokens = SimpleNamespace(tokens=[1] * draw.randint(2, 9))
        end = SimpleNamespace(
            ob=SimpleNamespace(length=5), ac=tokens, reward=0.0, episode_done=True, metrics={}, logs={}
        )
        return SimpleNamespace(transitions=[end], final_ob=SimpleNamespace(length=12))

    rewards = [float(draw.randint(0, 1)) for _ in range(SIZE)]
    return SimpleNamespace(
        trajectories_G=[trajectory() for _ in range(SIZE)],
        final_rewards_G=rewards,
        metrics_G=[{"correct": reward} for reward in rewards],
        get_total_rewards=lambda: rewards,
    )


if __name__ == "__main__":
    from stubs import stub

    sys.path.insert(0, sys.argv[1])
    stub("chz", "tinker", "wandb", "termcolor", "tinker_cookbook.rl.types", "tinker_cookbook.completers")
    from tinker_cookbook.rl.rollout_logging import serialize_rollout_summaries
    from tinker_cookbook.stores.storage import LocalStorage
    from tinker_cookbook.stores.training_store import TrainingRunStore
    from tinker_cookbook.utils.ml_log import JsonLogger

    draw = random.Random(0)
    store, logger = TrainingRunStore(LocalStorage(HERE)), JsonLogger(HERE)
    for step in range(12):
        groups = [group(draw) for _ in range(GROUPS)]
        for split, name in (("train", "train"), ("eval/math", "eval_math"))[: 2 if step == 10 else 1]:
            records = serialize_rollout_summaries(
                split=split,
                iteration=step,
                trajectory_groups_P=groups,
                taglist_P=[["math"]] * GROUPS,
                sampling_client_steps_P=[step] * GROUPS,
            )
            store.write_rollouts(step, records, base_name=name)
        rewards = [reward for one in groups for reward in one.get_total_rewards()]
        mixed = sum(len(set(one.get_total_rewards())) > 1 for one in groups) / GROUPS
        mean = sum(rewards) / len(rewards)
        metrics = {"env/all/reward/total": mean, "env/all/by_group/frac_mixed": mixed, "optim/lr": 1e-5}
        logger.log_metrics(metrics, step=step)

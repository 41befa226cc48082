"""tinker-cookbook's rollout summaries: `iteration_NNNNNN/train_rollout_summaries.jsonl` in its log directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.importers.reading.scalars import ScalarDump
from rolloutdoctor.io.locations.paths import Source


class TinkerCookbook(ScalarDump):
    """Summaries of rollouts from tinker-cookbook's RL training (`rollout_json_export`).

    Written by ``TrainingRunStore.write_rollouts`` of the records of ``serialize_rollout_summaries``
    (tinker_cookbook/rl/rollout_logging.py); read and compared with the writer of 9dfcc3a2. `iteration` is the `step` of
    metrics.jsonl, from 0 on. The reward is `total_reward`, from which the trainer subtracts the mean of the group.
    Groups of equal rewards may have been left out of the update (`remove_constant_reward_groups`). There are no tokens.
    """

    name = "tinker-cookbook"
    summary = "tinker-cookbook's iteration_*/train_rollout_summaries.jsonl"
    logs_beside = True
    keys = frozenset({"iteration", "group_idx", "traj_idx", "total_reward"})
    recording: Mapping[str, str] = {
        "*": "tinker-cookbook's summaries hold no tokens: write them with rolloutdoctor.recorders.own_loop in its "
        "training step"
    }

    def is_own(self, path: Path) -> bool:
        """By the end of its name."""
        return path.name.endswith("_rollout_summaries.jsonl")

    def rows(self, body: dict[str, object], where: str, file: Source) -> Iterator[dict[str, object]]:
        """One row: the trajectory."""
        step, group, place = (cells.natural(body, name, where) for name in ("iteration", "group_idx", "traj_idx"))
        at = "sampling_client_step"
        version = None if body.get(at) is None else cells.natural(body, at, where)
        split = TRAIN if body.get("split", TRAIN) == TRAIN else EVAL
        yield {
            "step": step,
            "split": split,
            "group_id": f"{step}-{group}",
            "sample_id": f"{step}-{group}-{place}",
            "reward": cells.number(body["total_reward"], f"{where}: total_reward"),
            "policy_version_min": version,
            "policy_version_max": version,
        }

"""rllm's episodes: `episodes/{train,val}_step_N_epoch_E/episode_*.json`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.importers.reading.scalars import ScalarDump
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import DataError


class Rllm(ScalarDump):
    """Episodes of rllm's trainers (`trainer.log_episodes`).

    Written by ``EpisodeLogger.log_episode`` (rllm/utils/episode_logger.py); read and compared with the writer of
    9beb6e0f. A trajectory is a row; those of one name and task at a step are a group, as in its advantages, and the
    identifier of an episode is ``TASK:NUMBER``. There are messages, and no tokens and no log-probs.
    """

    name = "rllm"
    summary = "rllm's episodes/{train,val}_step_*/episode_*.json"
    keys = frozenset({"training_step", "episode_id", "task_hash", "trajectories"})
    recording: Mapping[str, str] = {
        "*": "rllm's episodes hold no tokens: its trainer is verl, whose batches rolloutdoctor.recorders.verl records"
    }

    def is_own(self, path: Path) -> bool:
        """By its name."""
        return path.name.startswith("episode_") and path.suffix == ".json"

    def rows(self, body: dict[str, object], where: str, file: Source) -> Iterator[dict[str, object]]:
        """One row a trajectory."""
        step, episode, trajectories = (
            cells.natural(body, "training_step", where),
            str(body["episode_id"]),
            body["trajectories"],
        )
        if not isinstance(trajectories, list) or not all(isinstance(trajectory, dict) for trajectory in trajectories):
            raise DataError(
                f"{where}: trajectories is {cells.shown(trajectories)} where a list of objects was expected"
            )
        task = episode.rpartition(":")[0] or str(body["task_hash"])
        ended = body.get("termination_reason")
        for place, trajectory in enumerate(trajectories):
            yield {
                "step": step,
                "split": EVAL if Path(file.path).parent.name.startswith("val_") else TRAIN,
                "group_id": f"{step}-{task}-{trajectory.get('name')}",
                "task_id": task,
                "sample_id": f"{step}-{episode}-{place}",
                "reward": cells.number(trajectory.get("reward"), f"{where}: reward of trajectory {place}"),
                "status": None if ended is None else str(ended),
            }

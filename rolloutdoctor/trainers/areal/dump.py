"""AReaL's trajectories: `rollout/VERSION/TASK.jsonl` in its log directory."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.importers.reading.scalars import ScalarDump
from rolloutdoctor.io.locations.paths import Source


class Areal(ScalarDump):
    """Trajectories that AReaL dumps (`rollout.dump_to_file`).

    Written by ``WorkflowExecutor._dump_trajectory`` (areal/infra/workflow_executor.py); read and compared with the
    writer of 4aef98d8d. Rows of one task are a group. `step` is the newest version of the policy that sampled the task
    (`tail_version`): which update trained a row is not recorded, so that no log is read beside it. Rows that end in the
    prompt are not dumped. There are texts, and no tokens and no log-probs.
    """

    name = trainer = "areal"
    summary = "AReaL's rollout/VERSION/TASK.jsonl (dump_to_file)"
    keys = frozenset({"task_id", "sample_idx", "head_version", "tail_version", "reward"})
    recording: Mapping[str, str] = {
        "*": "AReaL's dump holds texts alone: write its batches with rolloutdoctor.recorders.own_loop in the trainer"
    }

    def is_own(self, path: Path) -> bool:
        """A number as a name."""
        return path.suffix == ".jsonl" and path.stem.isdecimal()

    def rows(self, body: dict[str, object], where: str, file: Source) -> Iterator[dict[str, object]]:
        """One row: the trajectory."""
        step, task, place = (cells.natural(body, name, where) for name in ("tail_version", "task_id", "sample_idx"))
        yield {
            "step": step,
            "split": EVAL if "eval-rollout" in Path(file.path).parts else TRAIN,
            "group_id": f"{step}-{task}",
            "sample_id": f"{step}-{task}-{place}",
            "reward": cells.number(body["reward"], f"{where}: reward"),
            "policy_version_min": cells.natural(body, "head_version", where),
            "policy_version_max": step,
            "prompt": cells.text(body.get("prompt")),
            "response": cells.text(body.get("completion")),
        }

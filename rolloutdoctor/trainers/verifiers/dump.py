"""verifiers' saved evaluations: `results.jsonl`, a line a rollout."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL
from rolloutdoctor.importers.reading import cells
from rolloutdoctor.importers.reading.scalars import ScalarDump
from rolloutdoctor.io.locations.paths import Source


class Verifiers(ScalarDump):
    """Rollouts of `vf-eval --save-results`, one evaluation a file.

    Written by ``state_to_output`` and ``save_outputs`` (verifiers/utils/save_utils.py), read at 00d83204. The rollouts
    of one example are a group. An evaluation has no training step: all rows are of step 0, and evaluation rows.
    rollout that ended in an error is aborted; its reward is as saved.
    """

    name = "verifiers"
    summary = "verifiers' results.jsonl (vf-eval --save-results)"
    keys = frozenset({"example_id", "prompt", "completion", "reward"})
    recording: Mapping[str, str] = {
        "*": "verifiers saves messages and rewards of an evaluation: the trainer that uses the environment has the rest"
    }

    def is_own(self, path: Path) -> bool:
        """By its name."""
        return path.name == "results.jsonl"

    def rows(self, body: dict[str, object], where: str, file: Source) -> Iterator[dict[str, object]]:
        """One row a rollout."""
        example, ended = str(body["example_id"]), body.get("stop_condition")
        status = None if ended is None else str(ended)
        if body.get("error") is not None:
            status = "aborted"
        elif body.get("is_truncated") is True:
            status = "length"
        yield {
            "step": 0,
            "split": EVAL,
            "group_id": example,
            "sample_id": f"{example}-{where.rpartition(' ')[2]}",
            "reward": cells.number(body["reward"], f"{where}: reward"),
            "status": status,
        }

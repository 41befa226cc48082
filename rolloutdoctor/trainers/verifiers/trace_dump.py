"""verifiers' evaluations from 0.4 on: `traces.jsonl`, an episode a line."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolloutdoctor.data.step_key import EVAL
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.prime_rl.trace_dump import episode_rows, is_of_prime_rl, written_columns

_NAME = "traces.jsonl"
_KEYS = {"task", "traces"}


class VerifiersTraces:
    """Episodes of an evaluation, one row for each branch of a trace.

    Written by ``write_episode`` (verifiers/v1/utils/trace_store.py), read at 0.4.0. The episodes of one task are a
    group. An evaluation has no training step: all rows are evaluation rows of step 0. The reward is the sum of the
    weighted rewards. prime-rl writes the same records by step, and its reader says what a branch is.
    """

    name = "verifiers-traces"
    summary = "verifiers' traces.jsonl of an evaluation (0.4 and later)"
    logs_beside = False
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "*": "verifiers saves messages and rewards of an evaluation: the trainer that uses the environment has the rest"
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the name, and the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        run = (first or {}).get("run")
        # A training writes the work that an episode was sent out for, and has its step in the path.
        is_of_training = isinstance(run, dict) and "work" in run
        if first is None or not first.keys() >= _KEYS or not isinstance(first["traces"], list) or is_of_training:
            return None
        return f"{'the file' if path.is_file() else _NAME} has episodes with a task and traces"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files line by line; a torn last line is left out."""
        base.only_columns(self.name, options, ())
        sink.begin(RunMetadata())
        for file in folders.named(sources, _files):
            rows: list[dict[str, object]] = []
            for line in lines.objects(file):
                if line.body is None:
                    sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                    continue
                group = {"id": _task(line.body, line.where)}
                _, of_episode = episode_rows({**line.body, "group": group}, line.where)
                rows += [row | {"step": 0, "split": EVAL} for row in of_episode]
            if rows:
                sink.write_from(file, written_columns(rows))
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no traces of verifiers there")


def _task(body: Mapping[str, object], where: str) -> str:
    """Return what tells a task: its number, else its content."""
    task = body.get("task")
    data = task.get("data") if isinstance(task, dict) else None
    number = data.get("idx") if isinstance(data, dict) else None
    return str(number) if isinstance(number, int) else json.dumps(task if data is None else data, sort_keys=True)[:1000]


def _files(path: Path) -> list[Path]:
    file = path if path.is_file() else path / _NAME
    is_it = file.name == _NAME and file.is_file() and not is_of_prime_rl(file)
    return [file] if is_it else []

"""verl's rollout dumps: `trainer.rollout_data_dir/{step}.jsonl`."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError

_KEYS = {"input", "output", "score", "step"}
_COLUMNS = ("step", "group_id", "sample_id", "reward", "trajectory_id", "prompt", "response", "ground_truth")

Groups = dict[tuple[int, bytes], int]


class VerlRollouts:
    """Rollouts that verl writes to `trainer.rollout_data_dir`, one file for each step.

    Written by ``_log_rollout_data`` and ``_write_generations`` of ``verl/trainer/ppo/v1/trainer_base.py`` (V1: with a
    `uid` ``{prompt}_{session}_{output}``, a group, a trajectory and its row) and of ``verl/trainer/ppo/ray_trainer.py``
    (V0: without one, so the group is the rows of a step with an equal `input`, and a prompt that was drawn twice in one
    step makes one group of two). Read and compared with verl 0.9.1. `score` is the sum of the token-level scores before
    any KL. Files of `validation_data_dir` look the same and are read as training rows. No ids, masks or log-probs.
    """

    name = "verl"
    summary = "verl's rollout_data_dir (JSON Lines), with its file logger beside it"
    logs_beside = True
    checks_files = True
    omits_rows = False
    recording: Mapping[str, str] = {}

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the keys of the first line."""
        for file in _files(path):
            first = lines.first_object(file)
            if first is not None:
                if not first.keys() >= _KEYS:
                    return None
                layout = "V1, with uid" if "uid" in first else "V0, without uid"
                return (
                    f"{'the file' if path.is_file() else file.name} has the keys input, output, score, step ({layout})"
                )
        return None

    def step_files(self, sources: Sequence[Source]) -> list[Source]:
        """Return the files, in the order of their names."""
        return [file for file in folders.named(sources, _files) if not _is_log(Path(file.path))]

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their names."""
        base.only_columns(self.name, options, ("reward",))
        files = self.step_files(sources)
        if not files:
            raise InputError(f"{sources[0].name}: no rollouts (*.jsonl with input, output, score and step) there")
        sink.begin(RunMetadata("verl"))
        reader = _Reader(sink, base.stored_name(options, "reward", "score"), _size_of(files))
        for file in files:
            reader.add(file)
        reader.finish()


class _Reader:
    """Streams the files of one dump into a sink.

    Args:
        sink: begun.
        score: name of the field that holds the reward.
        total: bytes of all files.
    """

    def __init__(self, sink: base.RunSink, score: str, total: int) -> None:
        self.sink, self.score, self.total = sink, score, total
        self._done = 0
        self._torn: list[tuple[str, int | None]] = []
        self._empty = 0
        self._without_uid = False
        self._first_step: int | None = None

    def add(self, file: Source) -> None:
        """Stream one file.

        Raises:
            DataError: if a line is no rollout; the message names it.
        """
        groups: Groups = {}
        last: int | None = None
        size = 0
        for chunk in lines.chunks([file]):
            last = self._write(chunk, groups, last)
            size = chunk.bytes_read
            self.sink.advance(self._done + size, self.total)
        self._empty += not size
        self._done += size
        self.sink.advance(self._done, self.total)

    def finish(self) -> None:
        """Say what was found out.

        Raises:
            InputError: if there was no whole line.
        """
        if not self.sink.rows or self._first_step is None:
            raise InputError("the dump holds no whole line; check that verl finished writing it")
        for name, last in self._torn:
            self.sink.fact(self._first_step if last is None else last, TRAIN, base.TORN_LINES, 1)
            self.sink.note(f"{name}: the last line was not written to its end, and is left out")
        if self._empty:
            self.sink.note(f"{self._empty} files are empty")
        if self._without_uid:
            self.sink.note(
                "no uid in the rows: rows of a step with the same input are one group, so a prompt that was drawn "
                "twice in a step makes one group of two"
            )

    def _saw(self, step: int) -> None:
        self._first_step = step if self._first_step is None else min(step, self._first_step)

    def _write(self, chunk: lines.Chunk, groups: Groups, last: int | None) -> int | None:
        """Write the rows of some lines, and return the step of the last."""
        rows: list[tuple[object, ...]] = []
        for line in lines.objects_of(chunk):
            row = line.body
            if row is None:
                self._torn.append((chunk.file.name, last))
                continue
            last = step = cells.natural(row, "step", line.where)
            self._saw(step)
            self._without_uid |= "uid" not in row
            score = cells.number(row.get(self.score), f"{line.where}: {self.score}")
            sample = str(row["uid"]) if "uid" in row else f"{step}-{line.number - 1}"
            texts = map(cells.text, (row.get("input"), row.get("output"), row.get("gts")) if self.sink.text else ())
            rows.append((step, _group(row, step, groups), sample, score, trajectory_of(sample), *texts))
        if rows:
            self.sink.write(dict(zip(_COLUMNS, zip(*rows, strict=True), strict=False)))
        return last


def trajectory_of(key: str) -> int | None:
    """Return a number for the session of a key ``{uid}_{session}_{output}``; None for other keys."""
    match = re.fullmatch(r"(?s)(.*_[0-9]+)_[0-9]+", key)
    return int.from_bytes(_digest(match[1])[:8], "little") >> 1 if match else None


def _group(row: dict[str, object], step: int, groups: Groups) -> str:
    uid = row.get("uid")
    if uid is not None:
        return str(uid).rsplit("_", 2)[0]
    return f"{step}-{groups.setdefault((step, _digest(row.get('input'))), len(groups))}"


def _digest(prompt: object) -> bytes:
    return hashlib.blake2b(str(prompt).encode("utf-8", "replace"), digest_size=16).digest()


def _size_of(files: Sequence[Source]) -> int:
    return sum(Path(file.path).stat().st_size for file in files)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return [file for file in folders.listed(path, lambda entry: entry.suffix == ".jsonl") if not _is_log(file)]


def _is_log(path: Path) -> bool:
    from rolloutdoctor.importers.logs.table import kind_of

    return kind_of(path) is not None

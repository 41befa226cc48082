"""verl's rollout dumps: `trainer.rollout_data_dir/{step}.jsonl`."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rolloutdoctor.batch import TRAIN
from rolloutdoctor.errors import InputError
from rolloutdoctor.importers import base, lines
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.paths import Source, natural_key

_KEYS = {"input", "output", "score", "step"}
_CHUNK_BYTES = 8 * 2**20


class VerlRollouts:
    """What `trainer.rollout_data_dir` makes verl write, one file for each step.

    Written by ``_log_rollout_data`` and ``_write_generations`` of ``verl/trainer/ppo/v1/trainer_base.py`` (V1: with a
    `uid` ``{prompt}_{session}_{output}``, so the group is what is before the last two parts) and of
    ``verl/trainer/ppo/ray_trainer.py`` (V0: without one, so the group is the rows of a step with an equal `input`, and
    a prompt that was drawn twice in one step makes one group of two). Read and compared with verl 0.9.1. `score` is
    the sum of the token-level scores, before any KL. Files of `validation_data_dir` look the same and are read as
    training rows. Token ids, masks and log-probs are not in these files.
    """

    name = "verl"
    summary = "verl's rollout_data_dir (JSON Lines), with its file logger beside it"

    def sniff(self, path: Path) -> str | None:
        """By the keys of the first line."""
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

    def read(self, sources: Sequence[Source], sink: base.Sink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their names."""
        base.only_columns(self.name, options, ("reward",))
        files = [file for source in sources for file in _named(source)]
        files = [file for file in files if not _is_log(Path(file.path))]
        if not files:
            raise InputError(f"{sources[0].name}: no rollouts (*.jsonl with input, output, score and step) there")
        sink.begin(RunMetadata("verl"))
        reader = _Reader(sink, options, sum(Path(file.path).stat().st_size for file in files))
        for file in files:
            reader.add(file)
        reader.finish()


class _Reader:
    def __init__(self, sink: base.Sink, options: base.ImportOptions, total: int) -> None:
        self.sink, self.total = sink, total
        self.score = base.stored_name(options, "reward", "score")
        self._done = 0
        self._torn: list[tuple[str, int | None]] = []
        self._empty = 0
        self._without_uid = 0
        self._steps: set[int] = set()
        self._rows: list[tuple[int, str, str, float | None, object, object]] = []

    def add(self, file: Source) -> None:
        """Stream one file."""
        groups: dict[tuple[int, bytes], int] = {}
        size, chunk = 0, 0
        last: int | None = None
        for line in lines.objects(file):
            where = f"{file.name}, line {line.number}"
            if line.body is None:
                self._torn.append((file.name, last))
                size = line.bytes_read
                continue
            row = line.body
            last = step = lines.natural(row, "step", where)
            group = _group(row, step, groups)
            self._without_uid += "uid" not in row
            score = lines.number(row.get(self.score), f"{where}: {self.score}")
            sample = str(row["uid"]) if "uid" in row else f"{step}-{line.number - 1}"
            self._rows.append((step, group, sample, score, row.get("input"), row.get("output")))
            self._steps.add(step)
            chunk, size = chunk + line.bytes_read - size, line.bytes_read
            if chunk > _CHUNK_BYTES:
                chunk = 0
                self._flush()
                self.sink.advance(self._done + size, self.total)
        self._empty += not size
        self._done += size
        self.sink.advance(self._done, self.total)
        if len(self._rows) > 4096:
            self._flush()

    def _flush(self) -> None:
        if not self._rows:
            return
        names = ("step", "group_id", "sample_id", "reward", "prompt", "response")
        columns: dict[str, Sequence[object]] = dict(zip(names, zip(*self._rows, strict=True), strict=True))
        if self.sink.text:
            columns["prompt"], columns["response"] = _texts(columns["prompt"]), _texts(columns["response"])
        self.sink.write(columns)
        self._rows = []

    def finish(self) -> None:
        """Write the rest, and say what was found out."""
        self._flush()
        if not self.sink.rows:
            raise InputError("the dump holds no whole line; check that verl finished writing it")
        for name, last in self._torn:
            self.sink.fact(min(self._steps) if last is None else last, TRAIN, base.TORN_LINES, 1)
            self.sink.note(f"{name}: the last line was not written to its end, and is left out")
        if self._empty:
            self.sink.note(f"{self._empty} files are empty")
        if self._without_uid:
            self.sink.note(
                "no uid in the rows: rows of a step with the same input are one group, so a prompt that was drawn "
                "twice in a step makes one group of two"
            )


def _group(row: dict[str, object], step: int, groups: dict[tuple[int, bytes], int]) -> str:
    uid = row.get("uid")
    if uid is not None:
        return str(uid).rsplit("_", 2)[0]
    digest = hashlib.blake2b(str(row.get("input")).encode("utf-8", "replace"), digest_size=16).digest()
    return f"{step}-{groups.setdefault((step, digest), len(groups))}"


def _texts(cells: Sequence[object]) -> list[object]:
    # A lone surrogate is valid JSON and not valid UTF-8.
    return [None if cell is None else str(cell).encode("utf-8", "replace").decode() for cell in cells]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    try:
        found = [entry for entry in path.iterdir() if entry.suffix == ".jsonl" and entry.is_file()]
    except OSError:
        return []
    return sorted((each for each in found if not _is_log(each)), key=lambda entry: natural_key(entry.name))


def _is_log(path: Path) -> bool:
    from rolloutdoctor.importers.metric_logs import kind_of

    return kind_of(path) is not None


def _named(source: Source) -> list[Source]:
    if Path(source.path).is_file():
        return [source]
    return [Source(str(file), f"{source.name.rstrip('/')}/{file.name}") for file in _files(Path(source.path))]

"""open-instruct's traces: `{run}_rollouts_{shard}.jsonl`."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError

_NAME = re.compile(r"(.*)_rollouts_(\d{6,})\.jsonl")
_HEAD = re.compile(rb'\{"step": (\d{1,18}), "sample_idx": (\d{1,18}), ')
_KEYS = {"step", "sample_idx", "prompt_idx", "response_tokens", "reward", "advantage"}
_CHUNK_ROWS = 4096


class OpenInstruct:
    """Traces of open-instruct's GRPO: `--save_traces` with `--rollouts_save_path`, 10,000 rows a file.

    Written by ``_save_rollouts`` (open_instruct/rl_utils.py), called by ``DataPreparationActor``
    (open_instruct/data_loader.py); v0.1 to v0.3, read and compared with the writer of e6c3044aa. `prompt_idx` counts
    within a step, so the group is step and `prompt_idx`. The recorded step counts from 0 and the logged `training_step`
    from 1: `step` is the logged one. A run that resumes begins again with file 0, appends, and repeats the steps after
    its checkpoint: of a step that was written more than once, the last time in the first of its files counts. There is
    no mask, so that the tokens of tools cannot be distinguished from the model's, and there are no log-probs of trainer
    or reference. Runs may share a directory; one is read at a time.
    """

    name = "open-instruct"
    summary = "open-instruct's rollouts (save_traces), *_rollouts_NNNNNN.jsonl"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "rollout_log_probs": "open-instruct writes `logprobs` where the engine returns them",
        "*": "open-instruct's traces (--save_traces) hold no trainer-side values: write them with "
        "rolloutdoctor.recorders.own_loop in its training step",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by file names and the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not first.keys() >= _KEYS:
            return None
        return f"{'the file' if path.is_file() else files[0].name} has the keys step, sample_idx, prompt_idx and reward"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Count how often each step was written, then stream the files in the order of their shards."""
        base.only_columns(self.name, options, ())
        files = folders.named(sources, _files)
        runs = sorted({_run(file) for file in files})
        if len(runs) > 1:
            raise InputError(
                f"{sources[0].name}: rollouts of several runs ({', '.join(runs[:5])}); give one run's files"
            )
        reader = _Reader(sink, 2 * sum(Path(file.path).stat().st_size for file in files))
        for file in files:
            reader.count(file)
        for chunk in lines.chunks(files):
            reader.add(chunk)
        reader.finish(sources[0].name)


class _Reader:
    def __init__(self, sink: base.RunSink, total: int) -> None:
        self.sink, self.total = sink, total
        self._done = 0
        self._home: dict[int, str] = {}
        self._written: Counter[int] = Counter()
        self._now: Counter[int] = Counter()
        self._rows: list[dict[str, object]] = []
        self._last: tuple[Source, int] | None = None
        self._repeated: Counter[int] = Counter()
        self._torn: list[tuple[str, int | None]] = []
        self._has_log_probs: bool | None = None

    def count(self, file: Source) -> None:
        """Find the file of each step that counts, and how often the step begins there, always with `sample_idx` 0."""
        for chunk in lines.chunks([file]):
            for step, sample in _beginnings(chunk):
                if self._home.setdefault(step, file.path) == file.path:
                    self._written[step] += sample == 0
        self._done += Path(file.path).stat().st_size
        self.sink.advance(self._done, self.total)

    def add(self, chunk: lines.Chunk) -> None:
        """Write some lines of a file."""
        file = chunk.file
        for line in lines.objects_of(chunk):
            if line.body is None:
                last = self._last[1] if self._last is not None and self._last[0] == file else None
                self._torn.append((file.name, last))
                continue
            step = _step(line.body, line.where)
            is_home = self._home.setdefault(step, file.path) == file.path
            self._now[step] += is_home and _sample(line.body, line.where) == 0
            if not is_home or self._now[step] < self._written[step]:
                self._repeated[step] += 1
                continue
            self._last = file, step + 1
            self._rows.append(self._row(line.body, line.where))
            if len(self._rows) >= _CHUNK_ROWS:
                self._flush(file)
        self._flush(file)
        self.sink.advance(self._done + chunk.bytes_read, self.total)

    def _row(self, body: dict[str, object], where: str) -> dict[str, object]:
        step, sample = _step(body, where), _sample(body, where)
        group = cells.natural(body, "prompt_idx", where)
        ids = cells.per_token(body.get("response_tokens"), Kind.TOKENS, f"{where}: response_tokens")
        prompt = cells.per_token(body.get("prompt_tokens"), Kind.TOKENS, f"{where}: prompt_tokens")
        status = body.get("finish_reason")
        row: dict[str, object] = {
            "step": step + 1,
            "group_id": f"{step + 1}-{group}",
            "sample_id": f"{step + 1}-{sample}",
            "reward": cells.number(body.get("reward"), f"{where}: reward"),
            "advantage": cells.number(body.get("advantage"), f"{where}: advantage"),
            "prompt_ids": prompt,
            "response_ids": ids,
            "status": None if status is None else str(status).encode("utf-8", "replace").decode(),
        }
        if self._has_log_probs is None:
            self._has_log_probs = body.get("logprobs") is not None
            self.sink.begin(RunMetadata(trainer="open-instruct"))
        if self._has_log_probs:
            sampled = body.get("logprobs")
            log_probs = (
                np.full(len(ids), np.nan)
                if sampled is None
                else cells.per_token(sampled, Kind.FLOATS, f"{where}: logprobs")
            )
            cells.aligned({"logprobs": log_probs}, len(ids), where)
            row["rollout_log_probs"] = log_probs
        return row

    def _flush(self, file: Source) -> None:
        if not self._rows:
            return
        self.sink.write_from(file, {name: [row[name] for row in self._rows] for name in self._rows[0]})
        self._rows = []

    def finish(self, name: str) -> None:
        """Say what was found out."""
        if not self.sink.rows:
            raise InputError(f"{name}: no whole row of open-instruct's rollouts there")
        steps = [step + 1 for step in self._home]
        for file, last in self._torn:
            self.sink.fact(min(steps) if last is None else last, TRAIN, base.TORN_LINES, 1)
            self.sink.note(f"{file}: the last line was not written to its end, and is left out")
        for step, rows in sorted(self._repeated.items()):
            self.sink.fact(step + 1, TRAIN, base.REPEATED_ROWS, rows)
        if self._repeated:
            self.sink.note(
                f"{len(self._repeated)} steps were written more than once, as by a resumed run; the last time counts"
            )
        self.sink.note("open-instruct records steps from 0 and logs them from 1; step is the logged one")


def _step(body: dict[str, object], where: str) -> int:
    return cells.natural(body, "step", where)


def _sample(body: dict[str, object], where: str) -> int:
    return cells.natural(body, "sample_idx", where)


def _beginnings(chunk: lines.Chunk) -> Iterator[tuple[int, int]]:
    """Yield `step` and `sample_idx` of each whole line, which are its first two fields as open-instruct writes it."""
    heads: list[tuple[int, int]] = []
    start = 0
    while start < len(chunk.raw):
        head = _HEAD.match(chunk.raw, start)
        start = chunk.raw.find(b"\n", start) + 1
        if head is None or not start:
            break
        heads.append((int(head[1]), int(head[2])))
    else:
        yield from heads
        return
    for line in lines.objects_of(chunk):
        if line.body is not None:
            yield _step(line.body, line.where), _sample(line.body, line.where)


def _run(file: Source) -> str:
    match = _NAME.fullmatch(Path(file.path).name)
    return match[1] if match else Path(file.path).name


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return folders.listed(path, lambda entry: _NAME.fullmatch(entry.name))

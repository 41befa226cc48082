"""prime-rl's token exports: `token_exports/step_{N}/rank_{R}.jsonl`, with the traces beside them."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.prime_rl.trace_dump import trained_rows

SCHEMA_VERSION = 1

_STEP = re.compile(r"step_\d+")
_RANK = re.compile(r"rank_\d+\.jsonl")
_KEYS = {"schema_version", "export_sequence_idx", "token_ids", "loss_mask", "trainer_logprobs"}
_FLOATS = {
    "rollout_log_probs": "inference_logprobs",
    "policy_log_probs": "trainer_logprobs",
    "advantages": "advantages",
    "entropy": "entropy",
}
_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
_OF_TRACE = (
    *("group_id", "task_id", "trajectory_id", "reward", "turns", "status", "error"),
    *("policy_version_min", "policy_version_max"),
)
_TRACES = "step_{}/train/effective/traces.jsonl"


class PrimeRlTokens:
    """Token exports of prime-rl's trainer: `trainer.enable_token_export`, a file for each step and rank.

    Written by ``TokenExporter`` (src/prime_rl/trainer/rl/token_export.py, `schema_version` 1; v0.5.1 and later), read
    and compared with the writer of 559b44772. A row is a whole sequence; the response begins at the first token of
    `loss_mask`. `trainer_logprobs` are the policy's at the loss. Numbers that are not finite are null, and read as NaN.
    `mismatch_kl` compares trainer and sampler, so it is not `kl`. The exporter leaves out sequences without a trained
    token. A token that `rl_weights` takes out with a 0 is not trained.

    Rewards and groups are in prime-rl's traces, `rollouts/` beside `token_exports/` (`prime_rl_traces`). A sequence has
    the tokens and the sampler's log-probs of one trace, unless its messages branch; where each of a step has, its
    rewards and groups are read. Without traces the loss is computed from the exported advantages.
    """

    name = "prime-rl-tokens"
    summary = "prime-rl's token_exports (trainer.enable_token_export)"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "reward": "prime-rl's token export has no rewards: give the output folder, whose rollouts/ has them, "
        "or record with rolloutdoctor.recorders.own_loop",
        "*": "prime-rl's token export (trainer.enable_token_export) does not hold it: record with "
        "rolloutdoctor.recorders.own_loop",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not first.keys() >= _KEYS:
            return None
        subject = "the file" if path.is_file() else f"{files[0].parent.name}/{files[0].name}"
        return f"{subject} has the keys schema_version, export_sequence_idx, token_ids and trainer_logprobs"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their steps and ranks."""
        base.only_columns(self.name, options, ())
        files = _finished(folders.named(sources, _files), sink)
        total = sum(Path(file.path).stat().st_size for file in files)
        reader = _Reader(sink, {_rollouts(file) for file in files})
        for chunk in lines.chunks(files):
            reader.add(chunk)
            sink.advance(chunk.bytes_read, total)
        reader.flush()
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no rows of prime-rl's token exports (step_*/rank_*.jsonl) there")
        if reader.unmatched:
            sink.note(
                f"{len(reader.unmatched)} steps have sequences that are those of no trace, and are read without "
                f"rewards and groups: {', '.join(map(str, reader.unmatched[:5]))}"
            )
        if reader.weighted:
            sink.note(
                f"{reader.weighted} rows have component weights other than 0 and 1, or of other components "
                f"({', '.join(_WEIGHTS)}): they are not read, and prime-rl's loss is not that of the rows"
            )


class _Reader:
    """Rows of one step after another, each with the reward and the group of its trace."""

    def __init__(self, sink: base.RunSink, rollouts: set[Path]) -> None:
        self.sink, self.rollouts = sink, rollouts
        self.weighted = 0
        self.unmatched: list[int] = []
        self.has_traces = any(any(folder.glob(_TRACES.format("*"))) for folder in rollouts)
        self._begun = False
        self._rows: list[tuple[Source, dict[str, object]]] = []

    def add(self, chunk: lines.Chunk) -> None:
        """Take some lines of a file; those of the steps before are written."""
        file = chunk.file
        for line in lines.objects_of(chunk):
            if line.body is None:
                self.sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                if self._rows and self._rows[-1][0] == file:
                    step = self._rows[-1][1]["step"]
                    self.sink.fact(int(step), TRAIN, base.TORN_LINES, 1)  # type: ignore[call-overload]  # see `_row`
                continue
            row, is_weighted = _row(line.body, line.where)
            self.weighted += is_weighted
            if self._rows and row["step"] != self._rows[-1][1]["step"]:
                self.flush()
            self._rows.append((file, row))

    def flush(self) -> None:
        """Write the rows of a step."""
        if not self._rows:
            return
        rows = [row for _, row in self._rows]
        is_joined = self.has_traces and self._join(rows)
        if not self._begun:
            # Without rewards from the start, the advantages are those that were exported.
            self._begun, self.has_traces = True, is_joined
            config = {} if is_joined else {"stored_advantages": True}
            self.sink.begin(RunMetadata(trainer="prime-rl", config=config))
        if self.has_traces and not is_joined:
            for row in rows:
                row |= dict.fromkeys(_OF_TRACE)
        for file, group in groupby(self._rows, lambda pair: pair[0]):
            part = [row for _, row in group]
            self.sink.write_from(file, {name: [row[name] for row in part] for name in part[0]})
        self._rows = []

    def _join(self, rows: Sequence[dict[str, object]]) -> bool:
        """Give each row what its trace says, and say that each has one; else none gets anything."""
        step = rows[0]["step"]
        files = [folder / _TRACES.format(step) for folder in self.rollouts]
        traces: dict[bytes, list[Mapping[str, object]]] = {}
        for trace in (trace for file in files if file.is_file() for trace in trained_rows(file)):
            if trace["response_ids"] is not None:
                traces.setdefault(_key(trace), []).append(trace)
        # Equal sequences with equal log-probs are of one prompt, and in one order as good as in another.
        matched = [traces[_key(row)].pop(0) if traces.get(_key(row)) else None for row in rows]
        if None in matched:
            self.unmatched.append(int(step))  # type: ignore[call-overload]  # `_row` has made sure of it
            return False
        for row, matched_trace in zip(rows, matched, strict=True):
            row |= {name: matched_trace[name] for name in _OF_TRACE if matched_trace is not None}
        return True


def _key(row: Mapping[str, object]) -> bytes:
    """The tokens of a row, and what the sampler gave them."""
    parts = [np.asarray(row[name], np.int64).tobytes() for name in ("prompt_ids", "response_ids")]
    sampled = np.asarray(row["rollout_log_probs"], np.float32)
    return b"".join((*parts, sampled[~np.isnan(sampled)].tobytes()))


def _rollouts(file: Source) -> Path:
    """The folder of traces beside the exports that a file is of."""
    return Path(file.path).absolute().parent.parent.parent / "rollouts"


def _row(body: dict[str, object], where: str) -> tuple[dict[str, object], bool]:
    """Make a row, and say whether its tokens have weights of their own."""
    version = body.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(
            f"{where}: schema_version {cells.shown(version)} of a token export, where {SCHEMA_VERSION} is known"
        )
    ids = cells.per_token(body.get("token_ids"), Kind.TOKENS, f"{where}: token_ids")
    mask = cells.zeros_and_ones(body.get("loss_mask"), f"{where}: loss_mask")
    arrays = {"token_ids": ids, "loss_mask": mask}
    for column, name in _FLOATS.items():
        arrays[column] = cells.per_token(body.get(name), Kind.FLOATS, f"{where}: {name}")
    cells.aligned(arrays, len(ids), where)
    # The sampler has log-probs for what it sampled; elsewhere there are zeros in their place.
    arrays["rollout_log_probs"] = np.where(mask == 1, arrays["rollout_log_probs"], np.nan)
    start = cells.response_start(mask)
    weights = [_numbers(body.get(name), len(ids)) for name in _WEIGHTS]
    trained = mask if weights[0] is None else np.where(weights[0] == 0, 0, mask).astype(mask.dtype)
    step, rank = cells.natural(body, "step", where), cells.natural(body, "rank", where)
    row: dict[str, object] = {name: arrays[name][start:] for name in _FLOATS}
    row |= {
        "step": step,
        "sample_id": f"{step}-{rank}-{cells.natural(body, 'export_sequence_idx', where)}",
        "prompt_ids": ids[:start],
        "response_ids": ids[start:],
        "response_mask": trained[start:],
        "micro_batch_id": cells.natural(body, "micro_step", where),
        "rank": rank,
    }
    is_plain = weights[0] is None or bool(np.isin(weights[0][mask == 1], (0, 1)).all())
    others = any(bool((weight != 0).any()) for weight in weights[1:] if weight is not None)
    return row, others or not is_plain


def _numbers(weights: object, count: int) -> np.ndarray | None:
    """Weights of a component of the loss, 0 where there is none; None where it has none at all."""
    if not isinstance(weights, list) or len(weights) != count or not any(each is not None for each in weights):
        return None
    return np.array([each if isinstance(each, (int, float)) else np.nan for each in weights], float)


def _finished(files: Sequence[Source], sink: base.RunSink) -> list[Source]:
    """Leave out the steps that prime-rl did not mark as complete, where it marks any."""
    marked = {file.path for file in files if (Path(file.path).parent / "STABLE").is_file()}
    if not marked:
        if files:
            sink.note("no step has prime-rl's mark STABLE: the last step may lack the rows of some ranks")
        return list(files)
    open_steps = sorted({Path(file.path).parent.name for file in files if file.path not in marked}, key=natural_key)
    if open_steps:
        sink.note(
            f"{len(open_steps)} steps without prime-rl's mark STABLE are left out, since ranks may be missing: "
            f"{', '.join(open_steps[:5])}"
        )
    return [file for file in files if file.path in marked]


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    rank_files: list[Path] = []
    for folder in (path, path / "token_exports"):
        try:
            steps = [each for each in folder.iterdir() if _STEP.fullmatch(each.name) and each.is_dir()]
            steps = [folder] if not steps and _STEP.fullmatch(folder.resolve().name) else steps
            rank_files += [file for step in steps for file in step.iterdir() if _RANK.fullmatch(file.name)]
        except OSError:
            continue
    return sorted((file for file in rank_files if file.is_file()), key=lambda file: natural_key(str(file)))

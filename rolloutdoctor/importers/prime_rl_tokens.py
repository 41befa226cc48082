"""prime-rl's token exports: `token_exports/step_{N}/rank_{R}.jsonl`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError

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


class PrimeRlTokens:
    """Token exports of prime-rl's trainer: `trainer.enable_token_export`, a file for each step and rank.

    Written by ``TokenExporter`` (src/prime_rl/trainer/rl/token_export.py, `schema_version` 1; v0.5.1 and later), read
    and compared with the writer of 559b44772. A row is a whole sequence; the response begins at the first token of
    `loss_mask`. `trainer_logprobs` are the policy's at the loss. Numbers that are not finite are null, and read as NaN.
    `mismatch_kl` compares trainer and sampler, so it is not `kl`. Rewards and groups are in prime-rl's traces and not
    here, and a row cannot be matched with its trace. The exporter leaves out sequences without a trained token.
    """

    name = "prime-rl-tokens"
    summary = "prime-rl's token_exports (trainer.enable_token_export)"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "reward": "prime-rl's token export has no rewards: give its traces instead (rollouts/step_*/train), or record "
        "with rolloutdoctor.recorders.own_loop",
        "*": "prime-rl's token export (trainer.enable_token_export) does not hold it: record with "
        "rolloutdoctor.recorders.own_loop",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not first.keys() >= _KEYS:
            return None
        what = "the file" if path.is_file() else f"{files[0].parent.name}/{files[0].name}"
        return f"{what} has the keys schema_version, export_sequence_idx, token_ids and trainer_logprobs"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their steps and ranks."""
        base.only_columns(self.name, options, ())
        files = _finished(folders.named(sources, _files), sink)
        total = sum(Path(file.path).stat().st_size for file in files)
        reader = _Reader(sink)
        for chunk in lines.chunks(files):
            reader.add(chunk)
            sink.advance(chunk.bytes_read, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no rows of prime-rl's token exports (step_*/rank_*.jsonl) there")
        if reader.weighted:
            sink.note(
                f"{reader.weighted} rows have component weights ({', '.join(_WEIGHTS)}), which are not read: "
                "their tokens do not all count alike in prime-rl's loss"
            )


class _Reader:
    def __init__(self, sink: base.RunSink) -> None:
        self.sink = sink
        self.weighted = 0
        self._begun = False
        self._last: tuple[Source, int] | None = None

    def add(self, chunk: lines.Chunk) -> None:
        """Write some lines of a file."""
        file = chunk.file
        rows: list[dict[str, object]] = []
        for line in lines.objects_of(chunk):
            if line.body is None:
                self.sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                if self._last is not None and self._last[0] == file:
                    self.sink.fact(self._last[1], TRAIN, base.TORN_LINES, 1)
                continue
            row, is_weighted = _row(line.body, line.where)
            self.weighted += is_weighted
            self._last = file, int(row["step"])  # type: ignore[call-overload]  # `_row` has made sure of it
            rows.append(row)
        self._write(file, rows)

    def _write(self, file: Source, rows: Sequence[Mapping[str, object]]) -> None:
        if not rows:
            return
        if not self._begun:
            self._begun = True
            self.sink.begin(RunMetadata())
        self.sink.write_from(file, {name: [row[name] for row in rows] for name in rows[0]})


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
    step, rank = cells.natural(body, "step", where), cells.natural(body, "rank", where)
    row: dict[str, object] = {name: arrays[name][start:] for name in _FLOATS}
    row |= {
        "step": step,
        "sample_id": f"{step}-{rank}-{cells.natural(body, 'export_sequence_idx', where)}",
        "prompt_ids": ids[:start],
        "response_ids": ids[start:],
        "response_mask": mask[start:],
        "micro_batch_id": cells.natural(body, "micro_step", where),
        "rank": rank,
    }
    return row, any(_is_given(body.get(name)) for name in _WEIGHTS)


def _is_given(weights: object) -> bool:
    return isinstance(weights, list) and any(each is not None for each in weights)


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
    found: list[Path] = []
    for folder in (path, path / "token_exports"):
        try:
            steps = [each for each in folder.iterdir() if _STEP.fullmatch(each.name) and each.is_dir()]
            steps = [folder] if not steps and _STEP.fullmatch(folder.resolve().name) else steps
            found += [file for step in steps for file in step.iterdir() if _RANK.fullmatch(file.name)]
        except OSError:
            continue
    return sorted((file for file in found if file.is_file()), key=lambda file: natural_key(str(file)))

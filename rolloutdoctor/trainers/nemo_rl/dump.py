"""NeMo-RL's training data: `train_data_step{N}.jsonl` in its log directory."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError

_NAME = re.compile(r"train_data_step(\d+)\.jsonl")
_FILTERED = "filtered_rewards"
_KEYS = {"rewards", "input_lengths", "idx"}
_TOKENS = {"token_ids", "token_loss_mask", "sample_loss_mask"}
_LOG_PROBS = {"rollout_log_probs": "generation_logprobs", "old_log_probs": "prev_logprobs"}
_ADDED = {"ref_log_probs": "reference_policy_logprobs"}
"""Columns of fields that a user may add."""


class NemoRl:
    """Logs of every step from NeMo-RL's GRPO and PPO.

    Written by ``Logger.log_batched_dict_as_jsonl`` (nemo_rl/utils/logger.py), called by nemo_rl/algorithms/grpo.py,
    grpo_sync.py and ppo.py; read and compared with the writer of 7ea279abf. NeMo-RL v0.6 and later: earlier files have
    no token ids and no masks, and are refused. None are written where `env.should_log_nemo_gym_responses` is true.

    Every field is a list of one. The step is in the file's name. Sequences are padded on the right and are cut to
    `input_lengths`; the response begins at the first token with a mask. Rows of a step with the same prompt are one
    group: NeMo-RL itself takes its baseline over rows of equal prompts. `response_mask` is `token_loss_mask` times
    `sample_loss_mask`, `response_mask_pre` the first alone. With dynamic sampling `rewards` is the unfiltered batch,
    which is not that of the other fields, so the reward is `filtered_rewards`. `prev_logprobs` of zeros alone are a
    placeholder (`force_on_policy_ratio`) and are left out. The text is prompt and response in one, and is left out
    too. There are no log-probs of the reference model, unless the user adds `reference_policy_logprobs` to what is
    written. That the trainer is NeMo-RL is stated, and of its options what the fields show: dynamic sampling, and the
    ratio that is forced to 1.
    """

    name = "nemo-rl"
    summary = "NeMo-RL's train_data_step*.jsonl (v0.6 and later)"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "*": "NeMo-RL does not log it: add it to the data that grpo.py gives `log_batched_dict_as_jsonl`, and name "
        "it with --from mapped --map COLUMN=NAME"
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by file names and the keys of the first line."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not first.keys() >= _KEYS:
            return None
        return f"{'the file' if path.is_file() else files[0].name} is a train_data_step*.jsonl with rewards and idx"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their steps; one step is in memory at a time."""
        base.only_columns(self.name, options, ())
        files = folders.named(sources, _files)
        files.sort(key=lambda file: _step(file))
        for before, after in pairwise(files):
            if _step(before) == _step(after):
                raise InputError(
                    f"{before.name} and {after.name} are both step {_step(before)}; give one run at a time"
                )
        total = sum(Path(file.path).stat().st_size for file in files)
        placeholder: bool | None = None
        for file, chunks in groupby(lines.chunks(files), lambda chunk: chunk.file):
            rows = _rows(file, chunks, sink, total)
            if rows and placeholder is None:
                placeholder = _is_placeholder(rows)
                sink.begin(_metadata(file, is_placeholder=placeholder))
            if rows:
                if not placeholder and _is_placeholder(rows):
                    raise DataError(
                        f"{file.name}: prev_logprobs are zeros here and not in earlier steps, as force_on_policy_ratio "
                        "makes them; give these steps by themselves"
                    )
                _write(file, rows, sink, leave_out=("old_log_probs",) if placeholder else ())
        sink.advance(total, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no rows of NeMo-RL's train_data_step*.jsonl there")
        if placeholder:
            sink.note("prev_logprobs are zeros, which NeMo-RL logs where force_on_policy_ratio skips them: left out")


def _metadata(file: Source, *, is_placeholder: bool) -> RunMetadata:
    """State the trainer and what its fields show of its options; nothing of a PPO run, which is another program.

    PPO sets the advantages of all that is not trained to 0, where GRPO gives every place that of its row.
    """
    shown: dict[str, object] = {"loss_fn.force_on_policy_ratio": True} if is_placeholder else {}
    for line in lines.objects_of(next(iter(lines.chunks([file])))):
        if line.body is not None and line.body.get("token_ids") != []:
            shown |= {"grpo.use_dynamic_sampling": True} if _FILTERED in line.body else {}
            mask, advantages = (
                np.asarray(_one(line.body, name, line.where)) for name in ("token_loss_mask", "advantages")
            )
            if np.any(advantages[mask == 1]) and not np.any(advantages[mask == 0]) and np.any(mask == 0):
                return RunMetadata()
    return RunMetadata(trainer="nemo-rl", config=shown)


def _rows(file: Source, chunks: Iterable[lines.Chunk], sink: base.RunSink, total: int) -> list[dict[str, object]]:
    step = _step(file)
    groups: dict[bytes, str] = {}
    rows: list[dict[str, object]] = []
    torn = 0
    for chunk in chunks:
        for line in lines.objects_of(chunk):
            if line.body is None:
                sink.note(f"{file.name}: the last line was not written to its end, and is left out")
                torn += 1
                continue
            if line.body.get("token_ids") == []:
                # The unfiltered rewards may be more than there are rows, and the writer goes on for all of them.
                continue
            row, number = _row(line.body, line.where)
            prompt = np.asarray(row["prompt_ids"]).tobytes()
            row["step"], row["group_id"] = step, groups.setdefault(prompt, f"{step}-{len(groups)}")
            row["sample_id"] = f"{step}-{number}"
            rows.append(row)
        sink.advance(chunk.bytes_read, total)
    if torn and rows:
        sink.fact(step, TRAIN, base.TORN_LINES, torn)
    return rows


def _row(body: dict[str, object], where: str) -> tuple[dict[str, object], int]:
    """Make a row, and its number."""
    for name in sorted(_TOKENS):
        if name not in body:
            raise InputError(
                f"{where}: no {name}; NeMo-RL writes it with GRPO and PPO since v0.6, and without it the response "
                "cannot be distinguished from the prompt"
            )
    length = cells.natural({"input_lengths": _one(body, "input_lengths", where)}, "input_lengths", where)
    ids = cells.per_token(_one(body, "token_ids", where), Kind.TOKENS, f"{where}: token_ids")
    mask = cells.zeros_and_ones(_one(body, "token_loss_mask", where), f"{where}: token_loss_mask")
    weight = cells.number(_one(body, "sample_loss_mask", where), f"{where}: sample_loss_mask")
    if weight not in (0.0, 1.0):
        raise DataError(f"{where}: sample_loss_mask is {cells.shown(weight)} where 0 or 1 was expected")
    if length > len(ids):
        raise DataError(f"{where}: input_lengths is {length} for a sequence of {len(ids)} tokens")
    arrays = {"token_ids": ids, "token_loss_mask": mask}
    shown = {column: name for column, name in _ADDED.items() if name in body}
    for column, name in {**_LOG_PROBS, **shown}.items():
        arrays[column] = cells.per_token(_one(body, name, where), Kind.FLOATS, f"{where}: {name}")
    arrays["advantages"] = cells.per_token(_one(body, "advantages", where), Kind.FLOATS, f"{where}: advantages")
    cells.aligned(arrays, len(ids), where)
    # Where nothing was sampled there are zeros in the place of log-probs.
    arrays["rollout_log_probs"] = np.where(mask == 1, arrays["rollout_log_probs"], np.nan)
    start = cells.response_start(mask[:length])
    row: dict[str, object] = {
        name: arrays[name][start:length] for name in ("rollout_log_probs", "old_log_probs", "advantages", *shown)
    }
    row["prompt_ids"], row["response_ids"] = ids[:start], ids[start:length]
    row["response_mask_pre"] = mask[start:length]
    row["response_mask"] = mask[start:length] * np.uint8(weight)
    name = _reward_of(body)
    row["reward"] = cells.number(_one(body, name, where), f"{where}: {name}")
    return row, cells.natural(body, "idx", where)


def _reward_of(body: Mapping[str, object]) -> str:
    return _FILTERED if _FILTERED in body else "rewards"


def _one(body: Mapping[str, object], name: str, where: str) -> object:
    """A field is written as a slice of the batch: a list of one."""
    value = body.get(name)
    if not isinstance(value, list) or len(value) != 1:
        raise DataError(f"{where}: {name} is {cells.shown(value)} where a list of one was expected")
    return value[0]


def _is_placeholder(rows: Sequence[Mapping[str, object]]) -> bool:
    """True if every log-prob is 0: nothing but the buffer that NeMo-RL made for them."""
    return not any(np.any(row["old_log_probs"]) for row in rows)  # type: ignore[call-overload]  # lists of numbers


def _write(file: Source, rows: Sequence[Mapping[str, object]], sink: base.RunSink, leave_out: tuple[str, ...]) -> None:
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in leave_out}
    sink.write_from(file, columns)


def _step(file: Source) -> int:
    match = _NAME.fullmatch(Path(file.path).name)
    if match is None or len(match[1]) > 18:
        raise InputError(f"{file.name}: NeMo-RL calls it train_data_step{{N}}.jsonl; the step is in the name")
    return int(match[1])


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _NAME.fullmatch(path.name) else []
    return folders.listed(path, lambda entry: _NAME.fullmatch(entry.name))

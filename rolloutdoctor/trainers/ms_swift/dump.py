"""ms-swift's `completions.jsonl`, and `args.json` beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders, lines
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError, RolloutDoctorError

_FIRST, _LAST = ("step", "prompt", "completion"), "advantages"
_OPTIONS = "args.json"


class MsSwiftCompletions:
    """Completions of ms-swift's GRPOTrainer: `log_completions true` writes them to ``output_dir/completions.jsonl``.

    Written by ``GRPOTrainer.log`` (swift/rlhf_trainers/grpo_trainer.py), read and compared with 3602360a5623. Each line
    is a table of the newest generation batch at one logged step: a list for each column, a column for each reward
    function.
    Steps in between are not there; a line whose rows are those of the line before is left out. The reward is the
    weighted sum of the functions that gave one, 0 where none did, as ms-swift has it. Groups are rows in a row, as many
    as `num_generations` in ``args.json`` (``BaseArguments.save_args``), else runs of equal prompts.
    """

    name = "ms-swift"
    summary = "ms-swift's completions.jsonl (log_completions true)"
    logs_beside = True
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {
        "*": "completions.jsonl has texts, rewards and advantages alone: write the rest with "
        "rolloutdoctor.recorders.own_loop in the trainer's _compute_loss_and_metrics",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the keys of the first line, each of which holds a list."""
        files = _files(path)
        first = lines.first_object(files[0]) if files else None
        if first is None or not _is_table(first):
            return None
        return f"{files[0].name} has lists under the keys step, prompt, completion and advantages"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream line by line."""
        base.only_columns(self.name, options, ())
        files = folders.named(sources, _files)
        stated = _stated(Path(files[0].path).with_name(_OPTIONS), sink) if files else {}
        total = sum(Path(file.path).stat().st_size for file in files)
        before: tuple[list[object], ...] | None = None
        last = 0
        unknown = {} if stated.get("eval_strategy") == "no" else {"splits_unknown": True}
        sink.begin(RunMetadata("ms-swift", _text(stated.get("swift_version")), _options(stated), recording=unknown))
        for chunk in lines.chunks(files):
            for line in lines.objects_of(chunk):
                if line.body is None:
                    sink.note(f"{line.where}: the last line was not written to its end, and is left out")
                    continue
                columns = _columns(line.body, stated, line.where)
                same = columns["prompt"], columns["response"], columns["advantage"]
                if same == before and sink.rows:
                    sink.fact(last, TRAIN, base.REPEATED_ROWS, len(same[0]))
                    continue
                if same[0]:
                    before, last = same, int(str(columns["step"][0]))
                    sink.write_from(chunk.file, columns)
            sink.advance(chunk.bytes_read, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no whole line of ms-swift's completions there")
        if not stated:
            sink.note(
                f"no {_OPTIONS} beside the completions: groups are runs of equal prompts, and the weights of several "
                "reward functions are not known, so that their sum is not read"
            )


def _is_table(body: Mapping[str, object]) -> bool:
    is_table = tuple(body)[:3] == _FIRST and _LAST in body
    return is_table and all(isinstance(body[name], list) for name in (*_FIRST, _LAST))


def _columns(body: Mapping[str, object], stated: Mapping[str, object], where: str) -> dict[str, list[object]]:
    """Canonical columns of a line."""
    if not _is_table(body):
        raise DataError(f"{where}: expected lists under step, prompt, completion and advantages")
    lists = {name: value for name, value in body.items() if isinstance(value, list)}
    rows = len(lists["step"])
    uneven = [name for name, value in lists.items() if len(value) != rows]
    if uneven:
        raise DataError(f"{where}: {uneven[0][:80]} has {len(lists[uneven[0]])} values, and step has {rows}")
    steps = [cells.natural({"step": _whole(step)}, "step", where) for step in lists["step"]]
    if len(set(steps)) > 1:
        raise DataError(f"{where}: rows of several steps in one line")
    # In the order in which they are written, reward functions come before the advantages.
    names = [name for name in list(body)[3 : list(body).index(_LAST)] if name in lists]
    scores = {name: [cells.number(value, f"{where}: {name[:80]}") for value in lists[name]] for name in names}
    weights = _weights(stated, names)
    table = np.array([[np.nan if x is None else x for x in scores[name]] for name in names], float).reshape(-1, rows)
    columns: dict[str, list[object]] = {
        "step": [*steps],
        "group_id": [f"{steps[0]}-{group}" for group in _groups(lists["prompt"], stated)],
        "sample_id": [f"{steps[0]}-{row}" for row in range(rows)],
        "advantage": [cells.number(value, f"{where}: advantages") for value in lists[_LAST]],
        "prompt": [_text(value) for value in lists["prompt"]],
        "response": [_text(value) for value in lists["completion"]],
    }
    if names:
        columns["rewards"] = [dict(zip(names, row, strict=True)) for row in zip(*scores.values(), strict=True)]
    # Without the options nothing says what the functions weigh in their sum.
    if len(names) == 1 or (names and stated):
        columns["reward"] = np.nansum(table * np.array(weights)[:, None], axis=0).tolist()
    return columns


def _whole(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19 else value


def _weights(stated: Mapping[str, object], names: Sequence[str]) -> list[float]:
    weights = stated.get("reward_weights")
    is_complete = (
        isinstance(weights, list) and len(weights) == len(names) and all(isinstance(x, int | float) for x in weights)
    )
    return [float(x) for x in weights] if is_complete and isinstance(weights, list) else [1.0] * len(names)


def _groups(prompts: Sequence[object], stated: Mapping[str, object]) -> list[int]:
    """Number of the group of each row."""
    size = stated.get("num_generations")
    if isinstance(size, int) and size > 0 and len(prompts) % size == 0:
        return [row // size for row in range(len(prompts))]
    groups, group = [], -1
    for row, prompt in enumerate(prompts):
        group += row == 0 or prompt != prompts[row - 1]
        groups.append(group)
    return groups


def _text(value: object) -> str | None:
    return None if value is None else str(value).encode("utf-8", "replace").decode()


def _stated(path: Path, sink: base.RunSink) -> Mapping[str, object]:
    """Options that ms-swift saved beside; none where there is no such file, or where it cannot be read."""
    if not path.is_file():
        return {}
    try:
        arguments = lines.document(read_small(path, expected="", most=2**22, error=InputError).encode())
    except RolloutDoctorError as error:
        sink.note(f"{_OPTIONS} cannot be read: {error}")
        return {}
    return arguments if isinstance(arguments, dict) and arguments.get("rlhf_type") in ("grpo", None) else {}


def _options(stated: Mapping[str, object]) -> dict[str, object]:
    from rolloutdoctor.trainers.ms_swift.trainer import OPTIONS

    names = {option.name for option in OPTIONS}
    return {name: value for name, value in stated.items() if name in names}


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return folders.listed(path, lambda entry: entry.name == "completions.jsonl")

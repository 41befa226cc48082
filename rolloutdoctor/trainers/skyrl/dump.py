"""SkyRL's dumped training inputs: `global_step_N_training_input.pkl`."""

import re
from collections.abc import Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import folders
from rolloutdoctor.importers.reading.pickles import check_pickle, load_inert
from rolloutdoctor.io.locations.paths import Source, natural_key, reason
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError

_NAME = re.compile(r"global_step_(\d{1,18})_training_input\.pkl")
_MARK = b"_rebuild_tensor_batch"

_TOKENS = {
    "action_log_probs": "old_log_probs",
    "base_action_log_probs": "ref_log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "advantages": "advantages",
    "values": "values",
}
"""SkyRL's fields to columns, one number a token."""


class SkyRlDump:
    """SkyRL's training inputs: `trainer.dump_data_batch=true` writes them to ``{export_path}/dumped_data``.

    Written by ``RayPPOTrainer.dump_data`` (skyrl/train/trainer.py) as a pickle of ``TrainingInputBatch``
    (skyrl/backends/skyrl_train/training_batch.py), read and compared with a9564572eb8e. Nothing of the pickle is
    imported or run: names stand for nothing, but for the one that holds the fields, and arrays are made of their bytes.
    Groups, mini-batches and, with `step_wise_trajectories` and the fully asynchronous trainer, which alone leaves
    `is_last_step` there, trajectories are those of its metadata. Rewards are taken out before the file is written.
    """

    name = "skyrl"
    summary = "SkyRL's training inputs (trainer.dump_data_batch=true), global_step_*_training_input.pkl"
    logs_beside = True
    checks_files = False
    omits_rows = False
    recording: Mapping[str, str] = {
        "reward": "SkyRL dumps a batch without its rewards: record them with rolloutdoctor.recorders.own_loop",
        "*": "the dump is made before the update: record what the worker has with rolloutdoctor.recorders.own_loop",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by the class that the first bytes of the pickle name."""
        files = _files(path)
        if not files:
            return None
        try:
            with files[0].open("rb") as file:
                head = file.read(512)
        except OSError:
            return None
        return f"{files[0].name} is a pickled TrainingInputBatch of SkyRL" if _MARK in head else None

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Read the files one after another, in the order of their steps."""
        base.only_columns(self.name, options, ())
        files = sorted(folders.named(sources, _files), key=lambda file: natural_key(Path(file.path).name))
        total, done = sum(Path(file.path).stat().st_size for file in files), 0
        sink.begin(RunMetadata("skyrl"))
        names: list[str] | None = None
        for place, file in enumerate(files):
            match = _NAME.fullmatch(Path(file.path).name)
            columns = _columns(file, int(match[1]) if match else place + 1)
            if names is not None and names != list(columns):
                raise DataError(f"{file.name}: other fields than in the files before: {', '.join(columns)}")
            names = list(columns)
            sink.write_from(file, columns)
            done += Path(file.path).stat().st_size
            sink.advance(done, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no training input of SkyRL there")


def _columns(file: Source, step: int) -> dict[str, Sequence[object]]:
    """Canonical columns of a batch. Responses stand at the right end of each row, what is before them is padding."""
    state = _state(file)
    fields, metadata = state.get("batch_dict"), state.get("metadata")
    if not isinstance(fields, dict) or not isinstance(metadata, dict):
        raise DataError(f"{file.name}: not the fields of a training input")
    response = _array(file, fields, "response_mask")
    trained = _array(file, fields, "loss_mask")
    if response is None or trained is None or trained.shape != response.shape or response.ndim != 2:
        raise DataError(f"{file.name}: expected response_mask and loss_mask of one shape")
    if not response.size:
        raise DataError(f"{file.name}: response_mask has the shape {response.shape}, which has no token; dump it again")
    pad = metadata.get("pad_size", 0)
    rows = len(response) - (pad if isinstance(pad, int) and 0 <= pad <= len(response) else 0)
    mask = response[:rows] != 0

    def tokens(values: np.ndarray) -> list[object]:
        return [values[row][mask[row]] for row in range(rows)]

    columns: dict[str, Sequence[object]] = {
        "step": [step] * rows,
        "sample_id": [f"{step}-{row}" for row in range(rows)],
        "response_mask": tokens((trained[:rows] != 0).astype(np.int8)),
    }
    groups = _parts(file, metadata, "policy_prompt_boundaries", rows)
    if groups is not None:
        columns["group_id"] = [f"{step}-{group}" for group in groups]
    updates = _parts(file, metadata, "policy_mini_batch_boundaries", rows)
    if updates is not None:
        columns["optim_step_id"] = updates
    trajectories = _trajectories(file, metadata, rows)
    if trajectories is not None:
        columns["trajectory_id"] = trajectories
    for name, column in _TOKENS.items():
        values = _array(file, fields, name)
        if values is not None:
            if values.shape != response.shape:
                raise DataError(f"{file.name}: {name} has the shape {values.shape}, and response_mask {response.shape}")
            columns[column] = tokens(values[:rows].astype(np.float32))
    sequences, there = _array(file, fields, "sequences"), _array(file, fields, "attention_mask")
    for name, values in (("sequences", sequences), ("attention_mask", there)):
        if values is not None and (values.ndim != 2 or len(values) != len(response)):
            raise DataError(f"{file.name}: {name} has the shape {values.shape}, and response_mask {response.shape}")
    if (
        sequences is not None
        and there is not None
        and sequences.shape == there.shape
        and sequences.shape[1] >= mask.shape[1]
    ):
        ids, begins = sequences[:rows].astype(np.int64), sequences.shape[1] - mask.sum(axis=1)
        columns["prompt_ids"] = [ids[row, : begins[row]][there[row, : begins[row]] != 0] for row in range(rows)]
        columns["response_ids"] = [ids[row, begins[row] :] for row in range(rows)]
    return columns


def _parts(file: Source, metadata: Mapping[str, object], name: str, rows: int) -> list[int] | None:
    """Number of the part that each row is in, given where parts begin and end."""
    bounds = metadata.get(name)
    if bounds is None:
        return None
    part, before = np.full(rows, -1), 0
    for number, pair in enumerate(bounds if isinstance(bounds, list | tuple) else [None]):
        if not isinstance(pair, list | tuple) or [type(end) for end in pair] != [int, int]:
            raise DataError(f"{file.name}: {name} is not a list of pairs of numbers")
        begin, end = pair
        if not before <= begin <= end:
            raise DataError(
                f"{file.name}: pair {number + 1} of {name} begins before row {before} or ends before it begins"
            )
        part[begin:end], before = number, end
    if bool((part < 0).any()):
        raise DataError(f"{file.name}: {name} leaves out rows")
    parts: list[int] = part.tolist()
    return parts


def _trajectories(file: Source, metadata: Mapping[str, object], rows: int) -> list[int] | None:
    """Number of the trajectory that each row is a step of; None where the batch does not say.

    Source: SkyRL ``RayPPOTrainer.compute_advantages_and_returns``.
    """
    last = metadata.get("is_last_step")
    if last is None:
        return None
    if not isinstance(last, list) or len(last) < rows or any(type(each) is not bool for each in last):
        raise DataError(f"{file.name}: is_last_step is not a list of True and False, one for each row")
    numbers: list[int] = np.cumsum([False, *last])[:rows].tolist()
    return numbers


def _array(file: Source, fields: Mapping[str, object], name: str) -> np.ndarray | None:
    """A field as an array; None where it was not recorded."""
    value = fields.get(name)
    if value is None:
        return None
    kept_as = value.get("format", "numpy") if isinstance(value, dict) else None
    # Whatever a pickle holds: an array compares cell by cell.
    if not isinstance(value, dict) or not isinstance(kept_as, str) or kept_as != "numpy":
        raise DataError(f"{file.name}: {name} is stored in a type that numpy has not; dump the batch in float32")
    kind, shape, data = value.get("dtype"), value.get("shape"), value.get("data")
    if not isinstance(data, bytes) or not isinstance(kind, str) or not re.fullmatch(r"(float|u?int)\d+|bool", kind):
        raise DataError(f"{file.name}: {name} is not an array of numbers")
    try:
        return np.frombuffer(data, dtype=np.dtype(kind)).reshape(tuple(shape))  # type: ignore[arg-type]  # anything else raises
    except (TypeError, ValueError) as error:
        raise DataError(f"{file.name}: {name} does not have the shape that it says") from error


def _state(file: Source) -> Mapping[str, object]:
    try:
        with Path(file.path).open("rb") as stream:
            with mmap(stream.fileno(), 0, access=ACCESS_READ) as content:
                check_pickle(content)
            state = load_inert(stream, {_MARK.decode(): lambda kind, state: state})
    except OSError as error:
        raise InputError(f"{file.name}: {reason(error)}") from None
    except ValueError as error:
        raise InputError(f"{file.name}: not a readable pickle ({error}); write or copy it again") from None
    if not isinstance(state, dict):
        raise InputError(f"{file.name}: not a training input of SkyRL")
    return state


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".pkl" else []
    for folder in (path, path / "dumped_data"):
        files = folders.listed(folder, lambda entry: _NAME.fullmatch(entry.name)) if folder.is_dir() else []
        if files:
            return sorted(files, key=lambda entry: natural_key(entry.name))
    return []

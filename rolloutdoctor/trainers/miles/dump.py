"""miles' dumps: `--dump-details`, or its debug flags for train and rollout data."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading.torch_files import load, looks_like_one
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.slime.dump import Dump, Pair, SlimeDump
from rolloutdoctor.trainers.slime.dump_rows import TOKEN_FIELDS, integer

_ROW_FIELDS = (*TOKEN_FIELDS.values(), "tokens", "response_lengths", "rollout_ids", "truncated")
_LOSSES = "policy_loss_debug"


class MilesDump(SlimeDump):
    """Dumps of miles: for each rollout its samples, and what each rank trained on.

    The train files are those of ``miles/utils/train_dump_utils.py``, the rollout file that of
    ``miles/ray/rollout/debug_data.py`` (0.1.0), joined on the samples' index. ``policy_loss_debug/`` has the log-probs
    at the loss, a file for each micro-batch of a rank (``miles/backends/training_utils/debug_dump.py``).
    ``dashboard_columns/`` mirrors what is in the rollout files.
    """

    name = "miles"
    summary = "miles' --dump-details: rollout_data/, train_data/ and policy_loss_debug/ (*.pt)"
    recording: Mapping[str, str] = {
        name: words.replace("'DIR/train_data/{rollout_id}.pt'", "'DIR/train_data/{rollout_id}_{rank}.pt'")
        for name, words in SlimeDump.recording.items()
    } | {"policy_log_probs": "--dump-details DIR writes them to policy_loss_debug/"}

    def detect(self, path: Path) -> str | None:
        """Recognise the folders by their names, which slime's have not; nothing is loaded."""
        if not path.is_dir():
            return None
        shards = [path / "train_data", path] if (path / "train_data").is_dir() else [path]
        files = [each for each in shards[0].iterdir() if re.fullmatch(r"\d+_\d+\.pt", each.name) and each.is_file()]
        folders = [name for name in (_LOSSES, "dashboard_columns") if (path / name).is_dir()]
        if files and looks_like_one(files[0]):
            return "the directory holds train data of torch.save, a file for each rollout and rank"
        description = super().detect(path) if folders else None
        return None if description is None else f"{description} beside {', '.join(folders)}"

    def dump_of(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> Dump:
        """Sort the files of the dump, and find the calls of the loss."""
        return _Dump.of(sources, sink, options)


class _Dump(Dump):
    """Train data comes in a file for each rank."""

    def __init__(self, sink: base.RunSink, options: base.ImportOptions) -> None:
        super().__init__(sink, options)
        self.calls: dict[int, list[Source]] = {}
        self.micros: dict[int, dict[int, int]] = {}

    def load(self, file: Source) -> dict[str, Any]:
        """Load a file; the columns of a shard become its samples."""
        body = load(file, allow_pickle=self.options.allow_pickle)
        if not isinstance(body, dict) or not isinstance(body.get("rollout_data"), dict):
            return super().load(file)
        columns = body["rollout_data"]
        if "qkv_format" not in body:
            raise InputError(f"{file.name}: train data of another trainer, or of slime before its format version 2")
        if integer(body.get("cp_size", 1), f"{file.name}: cp_size") != 1:
            raise InputError(
                f"{file.name}: each rank of a context-parallel run holds slices of rows; they are not joined"
            )
        indices = columns.get("sample_indices")
        if not isinstance(indices, list):
            raise InputError(f"{file.name}: no sample_indices, so its rows cannot be told apart")
        row_columns = {name: columns[name] for name in _ROW_FIELDS if _is_column(columns.get(name), len(indices))}
        body["samples"] = [{name: column[row] for name, column in row_columns.items()} for row in range(len(indices))]
        for sample, index in zip(body["samples"], indices, strict=True):
            sample["index"] = integer(index, f"{file.name}: sample_indices")
        return body

    def see(self, body: Mapping[str, Any]) -> bool:
        """Tell train data from rollout data, and remember what a shard of the last pipeline stage has."""
        columns = body.get("rollout_data")
        if columns is None:
            return False
        if "advantages" in columns:
            self.found.update(name for sample in body["samples"][:1] for name in sample)
            micros, rank = columns.get("micro_batch_indices"), integer(body.get("rank"), "rank of train data")
            self.uncut += micros is None
            count = len(micros) if isinstance(micros, (list, tuple)) else 0
            self.micros.setdefault(rank, {})[integer(body.get("rollout_id"), "rollout_id")] = count
        return True

    def settle(self, evaluations: int) -> None:
        """Decide which columns there are; those of the loss are, where every micro-batch has left a file."""
        shards = [Path(file.path) for pair in self.files.values() for file in pair.train]
        for rank, micros in self.micros.items():
            folder = shards[0].parent.parent / _LOSSES
            files = sorted(folder.glob(f"rank_{rank}_call_*.pt"), key=lambda each: natural_key(each.name))
            if files and len(files) == sum(micros.values()):
                self.calls[rank] = [Source(str(each), each.name) for each in files]
            elif files:
                self.sink.note(
                    f"{_LOSSES}/ has {len(files)} files of rank {rank} for {sum(micros.values())} micro-batches (a run "
                    "that was resumed, or recompute_loss_function): the log-probs at the loss are left out"
                )
        if self.calls:
            self.found.add("policy_log_probs")
        super().settle(evaluations)

    def at_loss(self, body: Mapping[str, Any]) -> dict[int, object]:
        """Log-probs at the loss by row of a shard; none where the advantages of its micro-batches are others."""
        rank, columns = body["rank"], body["rollout_data"]
        micros = columns.get("micro_batch_indices")
        if rank not in self.calls or not isinstance(micros, (list, tuple)):
            return {}
        first = sum(count for step, count in self.micros[rank].items() if step < body["rollout_id"])
        log_probs: dict[int, object] = {}
        for file, rows in zip(self.calls[rank][first:], micros, strict=False):
            loaded = load(file, allow_pickle=self.options.allow_pickle)
            samples = loaded.get("samples") if isinstance(loaded, dict) else None
            if not _is_column(samples, len(rows) if isinstance(rows, (list, tuple)) else -1):
                return {}
            for row, sample in zip(rows, samples, strict=True):
                trained = dict(enumerate(columns["advantages"])).get(row)
                if not isinstance(sample, dict) or not _is_same(sample.get("advantages"), trained):
                    return {}
                log_probs[row] = sample.get("train_log_probs")
        return log_probs

    def taken(self, pair: Pair) -> Source | None:
        """Every rank has a place."""
        return None

    def train_body(self, pair: Pair, rollout: Mapping[str, Any] | None) -> dict[str, Any]:
        """Join the shards of a rollout by the samples' index; of equal ones that of the first rank is taken."""
        shards = [body for body in map(self.load, pair.train) if "advantages" in body["rollout_data"]]
        if not shards:
            raise InputError(f"{pair.train[0].name}: no rank has advantages; give the files of all ranks")
        if rollout is None:
            order = sorted({sample["index"] for body in shards for sample in body["samples"]})
        else:
            order = [sample.get("index") for sample in rollout["samples"]]
        place = {index: position for position, index in enumerate(order)}
        samples: list[dict[str, Any]] = []
        layout: list[dict[str, object]] = []
        for body in shards:
            positions = [place.get(sample["index"], len(order)) for sample in body["samples"]]
            if any(sample["rollout_position"] in positions for sample in samples):
                continue
            columns, at_loss = body["rollout_data"], self.at_loss(body)
            for row, (sample, position) in enumerate(zip(body["samples"], positions, strict=True)):
                more = {"rollout_position": position, "data_parallel_rank": body["rank"]}
                samples.append(sample | more | {"policy_log_probs": at_loss.get(row)})
            layout.append(
                {
                    "partition": positions,
                    "micro_batch_indices": columns.get("micro_batch_indices"),
                    "num_microbatches": columns.get("num_microbatches"),
                }
            )
        if len(samples) != len(order):
            # They were in the means of their groups.
            self.sink.note(f"rollout {shards[0]['rollout_id']}: not every sample was trained on, and it is left out")
            samples = []
        return {"samples": samples, "raw_reward": shards[0]["rollout_data"].get("raw_reward"), "dp_shards": layout}


def _is_column(value: object, rows: int) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (list, tuple)) and len(value) == rows


def _is_same(left: object, right: object) -> bool:
    import torch

    return (
        isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and torch.equal(left.float(), right.float())
    )

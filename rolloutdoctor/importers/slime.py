"""slime's dumps: `--save-debug-train-data` joined with `--save-debug-rollout-data`, or `--dump-details` for both."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders
from rolloutdoctor.importers.reading.torch_files import load, looks_like_one
from rolloutdoctor.importers.slime_layout import cuts
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError

FORMAT_VERSION = 2

_LONGEST = 2**26
"""Tokens. No sample is longer."""

_TOKEN_FIELDS = {
    "response_mask": "loss_masks",
    "rollout_log_probs": "rollout_log_probs",
    "old_log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "values": "values",
    "advantages": "advantages",
    "returns": "returns",
    "kl": "kl",
    "entropy": "entropy",
}
_ROLLOUT_FIELDS = {"rollout_log_probs": "rollout_log_probs"}


class SlimeDump:
    """What slime's debug flags save, one file for each rollout.

    The train file is format version 2 of ``slime/observability/train_data_utils.py``, the rollout file that of
    ``slime/observability/rollout_data_utils.py`` (slime 0.3.1). They are joined on `rollout_position`, because the
    train file has no group, and its `rewards` are already normalised: the raw reward is the rollout's. `dp_shards` says
    how the rollout was cut into optimiser steps and micro-batches; where it is not whole, these are left out. Rollout
    files alone give rewards, masks and the sampler's log-probs. Evaluation files (``eval_*.pt``) carry no group and are
    left out.
    """

    name = "slime"
    summary = "slime's --dump-details, --save-debug-train-data and --save-debug-rollout-data (*.pt)"
    logs_beside = True
    recording: Mapping[str, str] = {
        "group_id": "keep rollout_data/ beside train_data/: --dump-details DIR, or --save-debug-rollout-data "
        "'DIR/rollout_data/{rollout_id}.pt' with --save-debug-train-data 'DIR/train_data/{rollout_id}.pt'",
        "*": "--save-debug-train-data 'DIR/train_data/{rollout_id}.pt' (or --dump-details DIR) makes slime write it",
    }

    def sniff(self, path: Path) -> str | None:
        """By file names; nothing is loaded."""
        files = _files(path)
        if not files or not looks_like_one(files[0]):
            return None
        if path.is_file():
            return "the file is an archive of torch.save"
        folders = sorted({file.parent.name for file in files})
        return f"the directory holds numbered *.pt of torch.save ({', '.join(folders)})"

    def read(self, sources: Sequence[Source], sink: base.Sink, options: base.ImportOptions) -> None:
        """Stream the rollouts in the order of their numbers; one rollout is in memory at a time."""
        base.only_columns(self.name, options, ("reward",))
        dump = _Dump.of(sources, sink, options)
        sink.begin(RunMetadata("slime"))
        total, done = dump.size, 0
        for step in sorted(dump.files):
            columns = dump.rows(step)
            if columns is not None and len(columns["step"]):
                sink.write(columns)
            done += dump.sizes[step]
            sink.advance(done, total)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no samples in these dumps")


@dataclass
class _Pair:
    """The files of one rollout."""

    train: Source | None = None
    rollout: Source | None = None


class _Dump:
    """All files by rollout, and the columns that the whole dump has."""

    def __init__(self, sink: base.Sink, options: base.ImportOptions) -> None:
        self.sink, self.options = sink, options
        self.files: dict[int, _Pair] = {}
        self.sizes: dict[int, int] = {}
        self.columns: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @classmethod
    def of(cls, sources: Sequence[Source], sink: base.Sink, options: base.ImportOptions) -> "_Dump":
        """Sort the files into pairs, and see which fields they have."""
        dump = cls(sink, options)
        evaluations = 0
        found: set[str] = set()
        uncut, contradicting = 0, 0
        for file in folders.named(sources, _files):
            if Path(file.path).name.startswith("eval_"):
                evaluations += 1
                continue
            body = dump._load(file)
            step = _integer(body.get("rollout_id"), f"{file.name}: rollout_id")
            pair = dump.files.setdefault(step, _Pair())
            is_train = "format_version" in body
            taken = pair.train if is_train else pair.rollout
            if taken is not None:
                raise InputError(
                    f"{taken.name} and {file.name} are both the {'train' if is_train else 'rollout'} data of rollout "
                    f"{step}; give one run at a time"
                )
            if is_train:
                pair.train = file
                found.update(name for sample in body["samples"][:1] for name in sample)
                uncut += cuts(body) is None
                contradicting += cuts(body) is None and _holds_shards(body.get("dp_shards"))
            else:
                pair.rollout = file
            dump.sizes[step] = dump.sizes.get(step, 0) + Path(file.path).stat().st_size
        dump._settle(found, evaluations, uncut, contradicting)
        return dump

    def _settle(self, found: set[str], evaluations: int, uncut: int, contradicting: int) -> None:
        if evaluations:
            self.sink.note(f"{evaluations} evaluation files (eval_*.pt) carry no group and are left out")
        trained = {step for step, pair in self.files.items() if pair.train is not None}
        paired = {step for step in trained if self.files[step].rollout is not None}
        if not self.files:
            raise InputError("no rollouts in these files; give slime's --dump-details directory")
        if trained and not paired:
            self.sink.note(
                "no rollout data beside the train data, so there are no groups: "
                "--save-debug-rollout-data (or --dump-details) writes them"
            )
            self.files = {step: self.files[step] for step in trained}
        elif trained and paired != set(self.files):
            self.sink.note(
                f"{len(self.files) - len(paired)} of {len(self.files)} rollouts have only train or only rollout data, "
                "and are left out"
            )
            self.files = {step: self.files[step] for step in paired}
        columns = ["step", "sample_id", "reward", "status", "response_ids", "prompt_ids"]
        if paired or not trained:
            columns += ["group_id", "response_mask_pre"]
        fields = {name for name, field in _TOKEN_FIELDS.items() if field in found} if trained else set()
        if trained and "rollout_ids" in found:
            columns.append("trajectory_id")
        self.columns = (*columns, *(fields or ("response_mask", "rollout_log_probs")), *(["rank"] if trained else []))
        if trained and not uncut:
            self.columns += ("optim_step_id", "micro_batch_id")
        elif trained and contradicting:
            self.sink.note(
                f"the dp_shards of {contradicting} train files do not say in which micro-batch every sample was: "
                "optim_step_id and micro_batch_id are left out"
            )

    def _load(self, file: Source) -> dict[str, Any]:
        body = load(file, allow_pickle=self.options.allow_pickle)
        if not isinstance(body, dict) or not isinstance(body.get("samples"), list):
            raise InputError(f"{file.name}: not a dump of slime: it has no list of samples")
        if not all(isinstance(sample, dict) for sample in body["samples"]):
            raise InputError(f"{file.name}: a sample is no dictionary; slime dumps each sample as one")
        version = _plain(body.get("format_version", FORMAT_VERSION))
        if not isinstance(version, int) or version != FORMAT_VERSION:
            raise InputError(
                f"{file.name}: format version {cells.shown(version)} of slime's train data, where "
                f"{FORMAT_VERSION} is known"
            )
        return body

    def rows(self, step: int) -> dict[str, list[object]] | None:
        """Return the columns of one rollout."""
        pair = self.files.get(step)
        if pair is None:
            return None
        rollout = None if pair.rollout is None else self._load(pair.rollout)
        columns: dict[str, list[object]] = {name: [] for name in self.columns}
        if pair.train is None:
            assert rollout is not None
            assert pair.rollout is not None
            for position, sample in enumerate(rollout["samples"]):
                where = f"{pair.rollout.name}, sample {position}"
                self._append(columns, step, position, {}, sample, None, where)
            return columns
        train = self._load(pair.train)
        raw = train.get("raw_reward")
        cut = cuts(train) or {}
        for index, sample in enumerate(train["samples"]):
            where = f"{pair.train.name}, sample {index}"
            position = _integer(sample.get("rollout_position", index), f"{where}: rollout_position")
            partner: Mapping[str, Any] | None = None
            if rollout is not None:
                if position >= len(rollout["samples"]):
                    raise DataError(f"{where}: rollout_position {position} is not in the rollout data; give one run")
                partner = rollout["samples"][position]
            score = raw[position] if isinstance(raw, list) and position < len(raw) else None
            self._append(columns, step, position, sample, partner, score, where)
            if "micro_batch_id" in columns:
                columns["optim_step_id"][-1], columns["micro_batch_id"][-1] = cut[position]
        return columns

    def _append(
        self,
        columns: dict[str, list[object]],
        step: int,
        position: int,
        train: Mapping[str, Any],
        rollout: Mapping[str, Any] | None,
        raw: object,
        where: str,
    ) -> None:
        tokens = _numbers(train.get("tokens", (rollout or {}).get("tokens")), f"{where}: tokens", np.int64)
        length = _integer(
            train.get("response_lengths", (rollout or {}).get("response_length")), f"{where}: response length"
        )
        if length > _LONGEST:
            raise DataError(f"{where}: a response of {length} tokens, more than any response has")
        if tokens is not None and length > len(tokens):
            raise DataError(f"{where}: a response of {length} tokens in a sample of {len(tokens)}")
        start = 0 if tokens is None else len(tokens) - length
        row: dict[str, object] = {
            "step": step,
            "sample_id": str(position),
            "reward": self._reward(rollout, raw, where),
            "prompt_ids": None if tokens is None else tokens[:start],
            "response_ids": None if tokens is None else tokens[start:],
            "status": (rollout or {}).get("status") if rollout else _status(train, where),
            "rank": None,
        }
        if train.get("data_parallel_rank") is not None:
            row["rank"] = _integer(train["data_parallel_rank"], f"{where}: data_parallel_rank")
        if train.get("rollout_ids") is not None:
            row["trajectory_id"] = _integer(train["rollout_ids"], f"{where}: rollout_ids")
        row["status"] = None if row["status"] is None else _label(row["status"], f"{where}: status")
        if rollout is not None:
            if rollout.get("group_index") is None:
                raise DataError(f"{where}: no group_index in the rollout data, so its group is unknown")
            row["group_id"] = _label(rollout["group_index"], f"{where}: group_index")
            mask = _numbers(rollout.get("loss_mask"), f"{where}: loss_mask", np.uint8)
            row["response_mask_pre"] = np.ones(length, np.uint8) if mask is None else mask
            if not train:
                # slime zeroes the mask of a removed sample when it makes train data of it.
                removed = _flag(rollout.get("remove_sample"), f"{where}: remove_sample")
                row["response_mask"] = np.zeros(length, np.uint8) if removed else row["response_mask_pre"]
        for name, field in (_TOKEN_FIELDS if train else _ROLLOUT_FIELDS).items():
            dtype = np.uint8 if name == "response_mask" else np.float32
            row[name] = _numbers((train or rollout or {}).get(field), f"{where}: {field}", dtype)
        for name, column in columns.items():
            value = row.get(name)
            if isinstance(value, np.ndarray) and name != "prompt_ids" and len(value) != length:
                raise DataError(f"{where}: {name} has {len(value)} values for a response of {length} tokens")
            column.append(value)

    def _reward(self, rollout: Mapping[str, Any] | None, raw: object, where: str) -> float | None:
        """The score that the baseline saw: the rollout's, since metadata may replace `raw_reward`."""
        reward = None if rollout is None else rollout.get("reward")
        if isinstance(reward, dict):
            key = self.options.columns.get("reward")
            if key is not None and key not in reward:
                raise DataError(f"{where}: no reward {key!r}; it has {', '.join(map(str, reward))}")
            reward = reward[key] if key is not None else raw
            if reward is None:
                raise DataError(f"{where}: several rewards; say which one with --map reward=KEY (slime's reward_key)")
        value = raw if reward is None else reward
        if value is None:
            return None
        return cells.number(_plain(value), f"{where}: the reward")


def _holds_shards(value: object) -> bool:
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)


def _status(train: Mapping[str, Any], where: str) -> str | None:
    if train.get("truncated") is None:
        return None
    return "truncated" if _flag(train["truncated"], f"{where}: truncated") else "completed"


def _flag(value: object, what: str) -> bool:
    value = _plain(value)
    if value is not None and not isinstance(value, (bool, int, float)):
        raise DataError(f"{what} is {cells.shown(value)} where true or false was expected")
    return bool(value)


def _label(value: object, what: str) -> str:
    if not isinstance(value, (str, int)):
        raise DataError(f"{what} is {cells.shown(value)} where a name or a number was expected")
    return str(value).encode("utf-8", "replace").decode()


def _plain(value: object) -> object:
    """The Python value of a tensor that holds one; anything else as it is."""
    import torch

    if not isinstance(value, torch.Tensor) or value.shape not in ((), (1,)):
        return value
    try:
        return value.detach().item()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # Of a tensor without memory, or of a layout that holds no plain number.
        return value


def _integer(value: object, what: str) -> int:
    value = _plain(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise DataError(f"{what} is {cells.shown(value)} where an integer of 0 or more was expected")
    return value


def _numbers(value: object, what: str, dtype: type) -> "np.ndarray | None":
    """One number for each token, from a tensor or a list."""
    if value is None:
        return None
    import torch

    if isinstance(value, torch.Tensor):
        is_real = not value.is_complex() and not value.is_quantized
        if value.dim() == 1 and value.layout is torch.strided and value.device.type == "cpu" and is_real:
            if value.numel() > _LONGEST:
                # A view may declare any length over a single stored number, and a copy of it would take that memory.
                raise DataError(f"{what} has {value.numel()} values, more than any response")
            value = value.detach().resolve_neg()
            if value.is_floating_point() and value.dtype not in (torch.float16, torch.float32, torch.float64):
                value = value.float()
            return _cast(value.numpy(), what, dtype)
    elif isinstance(value, (list, tuple)) and all(isinstance(each, _allowed(dtype)) for each in value):
        try:
            # What a float32 cannot hold is infinite here.
            with np.errstate(over="ignore"):
                return np.array(value, dtype)
        except OverflowError:
            raise DataError(f"{what} holds a number that is too large") from None
    raise DataError(f"{what} is not one number for each token")


def _cast(values: np.ndarray, what: str, dtype: type) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        found: np.ndarray = values.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(found, values):
        raise DataError(f"{what} holds numbers that are no {np.dtype(dtype)}")
    return found


def _allowed(dtype: type) -> tuple[type, ...]:
    return (bool, int, float) if np.issubdtype(dtype, np.floating) else (bool, int)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    found: list[Path] = []
    for folder in (path, path / "rollout_data", path / "train_data"):
        if folder.is_dir():
            found += [each for each in folder.iterdir() if re.search(r"\d[^/]*\.pt$", each.name) and each.is_file()]
    return sorted(found, key=lambda each: natural_key(str(each)))

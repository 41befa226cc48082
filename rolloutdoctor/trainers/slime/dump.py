"""slime's dumps: `--save-debug-train-data` joined with `--save-debug-rollout-data`, or `--dump-details` for both."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rolloutdoctor.importers import base
from rolloutdoctor.importers.reading import cells, folders
from rolloutdoctor.importers.reading.torch_files import load, looks_like_one
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.trainers.slime.dump_gaps import GroupNumbers
from rolloutdoctor.trainers.slime.dump_layout import cuts
from rolloutdoctor.trainers.slime.dump_rows import TOKEN_FIELDS, integer, plain, row_of

FORMAT_VERSION = 2


class SlimeDump:
    """Dumps of slime's debug flags, one file for each rollout.

    The train file is format version 2 of ``slime/observability/train_data_utils.py``, the rollout file that of
    ``slime/observability/rollout_data_utils.py`` (slime 0.3.1). They are joined on `rollout_position`, because the
    train file has no group, and its `rewards` are already normalised: the raw reward is the rollout's. `dp_shards` says
    how the rollout was cut into optimizer steps and micro-batches; where it is not whole, these are left out. Rollout
    files alone give rewards, masks and the sampler's log-probs. Evaluation files (``eval_*.pt``) carry no group and are
    left out.
    """

    name = "slime"
    summary = "slime's --dump-details, --save-debug-train-data and --save-debug-rollout-data (*.pt)"
    logs_beside = True
    checks_files = False
    omits_rows = False
    recording: Mapping[str, str] = {
        "group_id": "keep rollout_data/ beside train_data/: --dump-details DIR, or --save-debug-rollout-data "
        "'DIR/rollout_data/{rollout_id}.pt' with --save-debug-train-data 'DIR/train_data/{rollout_id}.pt'",
        "*": "--save-debug-train-data 'DIR/train_data/{rollout_id}.pt' (or --dump-details DIR) records it",
    }

    def detect(self, path: Path) -> str | None:
        """Recognise the format by file names; nothing is loaded."""
        files = _files(path)
        if not files or not looks_like_one(files[0]):
            return None
        if path.is_file():
            return "the file is an archive of torch.save"
        folders = sorted({file.parent.name for file in files})
        return f"the directory holds numbered *.pt of torch.save ({', '.join(folders)})"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Stream the rollouts in the order of their numbers; one rollout is in memory at a time."""
        base.only_columns(self.name, options, ("reward",))
        dump = self.dump_of(sources, sink, options)
        sink.begin(RunMetadata(self.name))
        total, done, numbers = dump.size, 0, GroupNumbers()
        for step in sorted(dump.files):
            columns = dump.rows(step)
            if columns is not None and len(columns["step"]):
                numbers.add(step, columns.get("group_id", ()))
                sink.write(columns)
            done += dump.sizes[step]
            sink.advance(done, total)
        note = numbers.note()
        if note is not None:
            sink.note(note)
        if not sink.rows:
            raise InputError(f"{sources[0].name}: no samples in these dumps")

    def dump_of(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> "Dump":
        """Sort the files of the dump."""
        return Dump.of(sources, sink, options)


@dataclass
class Pair:
    """The files of one rollout."""

    train: tuple[Source, ...] = ()
    rollout: Source | None = None


class Dump:
    """All files by rollout, and the columns that the whole dump has."""

    def __init__(self, sink: base.RunSink, options: base.ImportOptions) -> None:
        self.sink, self.options = sink, options
        self.files: dict[int, Pair] = {}
        self.sizes: dict[int, int] = {}
        self.columns: tuple[str, ...] = ()
        self.found: set[str] = set()
        self.uncut, self.contradicting = 0, 0

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.sizes.values())

    @classmethod
    def of(cls, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> Self:
        """Sort the files into pairs, and see which fields they have."""
        dump = cls(sink, options)
        evaluations = 0
        for file in folders.named(sources, _files):
            if Path(file.path).name.startswith("eval_"):
                evaluations += 1
                continue
            body = dump.load(file)
            step = integer(body.get("rollout_id"), f"{file.name}: rollout_id")
            pair = dump.files.setdefault(step, Pair())
            is_train = dump.see(body)
            taken = dump.taken(pair) if is_train else pair.rollout
            if taken is not None:
                raise InputError(
                    f"{taken.name} and {file.name} are both the {'train' if is_train else 'rollout'} data of rollout "
                    f"{step}; give one run at a time"
                )
            if is_train:
                pair.train = (*pair.train, file)
            else:
                pair.rollout = file
            dump.sizes[step] = dump.sizes.get(step, 0) + Path(file.path).stat().st_size
        dump.settle(evaluations)
        return dump

    def see(self, body: Mapping[str, Any]) -> bool:
        """Tell train data from rollout data, and remember what it has."""
        if "format_version" not in body:
            return False
        self.found.update(name for sample in body["samples"][:1] for name in sample)
        self.uncut += cuts(body) is None
        self.contradicting += cuts(body) is None and _holds_shards(body.get("dp_shards"))
        return True

    def taken(self, pair: Pair) -> Source | None:
        """Return a file of the same train data, which leaves no place for another."""
        return next(iter(pair.train), None)

    def train_body(self, pair: Pair, rollout: Mapping[str, Any] | None) -> dict[str, Any]:
        """Load the train data of a rollout: samples, their raw rewards, and shards."""
        return self.load(pair.train[0])

    def settle(self, evaluations: int) -> None:
        """Decide which rollouts and columns there are, once all files are seen."""
        if evaluations:
            self.sink.note(f"{evaluations} evaluation files (eval_*.pt) carry no group and are left out")
        trained = {step for step, pair in self.files.items() if pair.train}
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
        fields = {name for name, field in TOKEN_FIELDS.items() if field in self.found} if trained else set()
        if trained and "rollout_ids" in self.found:
            columns.append("trajectory_id")
        self.columns = (*columns, *(fields or ("response_mask", "rollout_log_probs")), *(["rank"] if trained else []))
        if trained and not self.uncut:
            self.columns += ("optim_step_id", "micro_batch_id")
        elif trained and self.contradicting:
            self.sink.note(
                f"the dp_shards of {self.contradicting} train files do not say in which micro-batch every sample was: "
                "optim_step_id and micro_batch_id are left out"
            )

    def load(self, file: Source) -> dict[str, Any]:
        """Load a file.

        Raises:
            InputError: if it is none of the dump.
        """
        body = load(file, allow_pickle=self.options.allow_pickle)
        if not isinstance(body, dict) or not isinstance(body.get("samples"), list):
            raise InputError(f"{file.name}: not a dump of slime: it has no list of samples")
        if not all(isinstance(sample, dict) for sample in body["samples"]):
            raise InputError(f"{file.name}: a sample is no dictionary; slime dumps each sample as one")
        version = plain(body.get("format_version", FORMAT_VERSION))
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
        rollout = None if pair.rollout is None else self.load(pair.rollout)
        if not pair.train:
            assert rollout is not None
            assert pair.rollout is not None
            rows = [
                self._row(step, position, {}, sample, None, f"{pair.rollout.name}, sample {position}")
                for position, sample in enumerate(rollout["samples"])
            ]
        else:
            rows = self._trained(step, pair, rollout)
        return {name: [row[name] for row in rows] for name in self.columns}

    def _trained(self, step: int, pair: Pair, rollout: Mapping[str, Any] | None) -> list[dict[str, object]]:
        """Make the rows of the train data, each joined with its sample of the rollout data if there is any."""
        train, file = self.train_body(pair, rollout), pair.train[0]
        raw = train.get("raw_reward")
        cut = cuts(train) or {}
        rows = []
        for index, sample in enumerate(train["samples"]):
            where = f"{file.name}, sample {index}"
            position = integer(sample.get("rollout_position", index), f"{where}: rollout_position")
            partner: Mapping[str, Any] | None = None
            if rollout is not None:
                if position >= len(rollout["samples"]):
                    raise DataError(f"{where}: rollout_position {position} is not in the rollout data; give one run")
                partner = rollout["samples"][position]
            score = raw[position] if isinstance(raw, list) and position < len(raw) else None
            row = self._row(step, position, sample, partner, score, where)
            if "micro_batch_id" in self.columns:
                row["optim_step_id"], row["micro_batch_id"] = cut.get(position, (None, None))
            rows.append(row)
        return rows

    def _row(
        self,
        step: int,
        position: int,
        train: Mapping[str, Any],
        rollout: Mapping[str, Any] | None,
        raw: object,
        where: str,
    ) -> dict[str, object]:
        key = self.options.columns.get("reward")
        row = row_of(train, rollout, raw=raw, reward_key=key, columns=self.columns, where=where)
        return row | {"step": step, "sample_id": str(position)}


def _holds_shards(value: object) -> bool:
    return value is not None and not (isinstance(value, (list, tuple, dict)) and not value)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".pt" else []
    wanted = re.compile(r"(?!.*(checkpoint|ckpt|model)).*\d.*\.pt")  # but for files of weights
    folders = [folder for folder in (path, path / "rollout_data", path / "train_data") if folder.is_dir()]
    files = [each for folder in folders for each in folder.iterdir() if wanted.fullmatch(each.name) and each.is_file()]
    return sorted(files, key=lambda each: natural_key(str(each)))

"""TRL's completions directory: `completions_*.parquet`, and `trainer_state.json` beside it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.importers import base
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import read_log
from rolloutdoctor.importers.reading.parquet_files import batches, schema_of
from rolloutdoctor.io.locations.paths import Source, natural_key
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import values_by_step
from rolloutdoctor.io.parquet.files import open_parquet, reading
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.trl.dump_groups import File, Scheme, find_scheme, split_point, weighted

_NAME = re.compile(r"completions_(\d+)\.parquet")
_FIRST, _LAST = ("step", "prompt", "completion"), "advantage"
_MOST_BYTES = 2 * 2**30


class TrlCompletions:
    """Completions of TRL's GRPOTrainer: `log_completions=True` writes them to ``<output_dir>/completions``.

    Written by ``GRPOTrainer.log`` (trl/trainer/grpo_trainer.py), read and compared with TRL 1.16. The files hold no
    group, no split and no configuration. Groups are runs of equal prompts, confirmed by the advantages: the group size,
    the reward columns and `scale_rewards` are those that reproduce every logged advantage. Evaluations are known from
    ``trainer_state.json``, in the output directory or its newest checkpoint. Token ids, masks and log-probs are not
    in these files: `rolloutdoctor.recorders.trl` records them.
    """

    name = "trl"
    summary = "TRL's completions directory (log_completions=True)"
    logs_beside = False
    checks_files = True
    omits_rows = True
    recording: Mapping[str, str] = {}

    def detect(self, path: Path) -> str | None:
        """Recognise the format by file names and columns."""
        files = _files(path)
        if not files or not _has_columns(files[0]):
            return None
        subject = "file is" if path.is_file() else "directory holds"
        return f"the {subject} completions_*.parquet with the columns step, prompt, completion and advantage"

    def read(self, sources: Sequence[Source], sink: base.RunSink, options: base.ImportOptions) -> None:
        """Find the scheme from all files first, then stream them in the order of their steps."""
        base.only_columns(self.name, options, ("reward",))
        paths = _sources(sources)
        total = 2 * sum(Path(source.path).stat().st_size for source in paths)
        logs = _trainer_state(paths[0], sink.note)
        if logs is None:
            sink.note(
                "no trainer_state.json beside the completions: evaluation rows cannot be distinguished from training "
                "rows"
            )
        history = logs or {}
        evaluations = {step: entry for (step, split), entry in history.items() if split == EVAL}
        for (step, split), entry in history.items():
            sink.log(step, split, entry)
        done = 0
        sampled: list[File] = []
        for source in paths:
            file = _read(source, text=False)
            # A few hundred files settle it; more would only cost memory.
            if file.step not in evaluations and len(sampled) < 200:
                sampled.append(file)
            done += Path(source.path).stat().st_size
            sink.advance(done, total)
        scheme = find_scheme(sampled, options.columns.get("reward"))
        for text in scheme.notes:
            sink.note(text)
        unknown = {"splits_unknown": True} if logs is None else {}
        sink.begin(RunMetadata("trl", None, scheme.config(), recording=unknown))
        writer = _Writer(sink, scheme, evaluations, history, max(file.rows for file in sampled) if sampled else 0)
        for source in paths:
            writer.add(_read(source, text=True))
            done += Path(source.path).stat().st_size
            sink.advance(done, total)
        writer.finish()


@dataclass
class _Writer:
    """Writes files in step order, without the rows that an earlier file had, and keeps what it finds out."""

    sink: base.RunSink
    scheme: Scheme
    evaluations: Mapping[int, Mapping[str, float | None]]
    history: Mapping[StepKey, Mapping[str, float]]
    full: int
    _before: Sequence[object] = ()
    _before_key: tuple[int, str] | None = None
    _unclear: int = 0
    _has_truths: bool | None = None

    def add(self, file: File) -> None:
        """Write one file."""
        same = [*file.digests()]
        if self._before_key is not None and same == self._before:
            self.sink.fact(*self._before_key, base.REPEATED_ROWS, file.rows)
            return
        cut = file.rows
        if file.step in self.evaluations:
            point = split_point(file, self.evaluations[file.step], self.scheme)
            self._unclear += point is None
            cut = point or 0
        before, before_key = self._before, self._before_key
        self._before = same
        if cut:
            repeated = cut < file.rows and cut <= len(before) and same[:cut] == before[-cut:]
            if repeated and before_key is not None:
                self.sink.fact(*before_key, base.REPEATED_ROWS, cut)
            else:
                self._write(file, 0, cut, TRAIN)
        if cut < file.rows:
            self._write(file, cut, file.rows, EVAL)
            if cut:
                self.sink.fact(file.step, EVAL, base.MIXED_ROWS, file.rows - cut)
            # A generation that a step reuses is logged without a reward, and its rows are in an earlier file.
            if self.history.get(StepKey(file.step, TRAIN), {}).get("reward") is not None and self.full > cut:
                self.sink.fact(file.step, EVAL, base.LOST_ROWS, self.full - cut)

    def _write(self, file: File, start: int, stop: int, split: str) -> None:
        rows = stop - start
        size = self.scheme.size if split == TRAIN else None
        columns: dict[str, Sequence[object]] = {
            "step": [file.step] * rows,
            "group_id": [f"{file.step}-{split}-{group}" for group in file.groups(start, stop, size)],
            "sample_id": [f"{file.step}-{row}" for row in range(start, stop)],
            "split": [split] * rows,
        }
        if self.scheme.weights:
            for name in self.scheme.weights:
                file.scores(name)
            columns["reward"] = weighted(file, self.scheme.weights)[start:stop].tolist()
        names = self.scheme.names
        if names:
            unscored = np.full(file.rows, np.nan)
            # What the user named as the reward has to be there, other columns need not.
            strict = self.scheme.weights or names
            scores = [
                (file.scores(name) if name in strict else file.numbers.get(name, unscored))[start:stop].tolist()
                for name in names
            ]
            columns["rewards"] = [dict(zip(names, row, strict=True)) for row in zip(*scores, strict=True)]
        columns["advantage"] = file.advantage[start:stop].tolist()
        columns["prompt"] = [_words(cell) for cell in file.prompts[start:stop]]
        columns["response"] = [_words(cell) for cell in file.completions[start:stop]]
        self._has_truths = bool(file.truths) if self._has_truths is None else self._has_truths
        if self._has_truths:
            truths = file.truths or [None] * file.rows
            columns["ground_truth"] = [None if cell is None else str(cell) for cell in truths[start:stop]]
        self.sink.write(columns)
        self._before_key = (file.step, split)

    def finish(self) -> None:
        """Say what could not be settled."""
        if self._unclear:
            self.sink.note(
                f"{self._unclear} files of steps with an evaluation may hold training rows too; all their rows are "
                "taken as evaluation rows"
            )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if _NAME.fullmatch(path.name) else []
    for folder in (path, path / "completions"):
        if folder.is_dir():
            files = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name) and entry.is_file()]
            if files:
                return sorted(files, key=lambda entry: natural_key(entry.name))
    return []


def _has_columns(path: Path) -> bool:
    schema = schema_of(path)
    names = [] if schema is None else schema.names
    return tuple(names[:3]) == _FIRST and _LAST in names


def _sources(sources: Sequence[Source]) -> list[Source]:
    expanded = []
    for source in sources:
        paths = _files(Path(source.path))
        if not paths:
            raise InputError(f"{source.name}: no completions_*.parquet there; give TRL's completions directory")
        is_file = Path(source.path).is_file()
        expanded += [
            source if is_file else Source(str(path), f"{source.name.rstrip('/')}/{path.name}") for path in paths
        ]
    return sorted(expanded, key=lambda each: natural_key(Path(each.path).name))


def _trainer_state(first: Source, notes: ReaderNotes) -> Mapping[StepKey, Mapping[str, float]] | None:
    output = Path(first.path).parent.parent
    places = [output / "trainer_state.json", Path(first.path).parent / "trainer_state.json"]
    places += sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: natural_key(str(path)))[::-1]
    for place in places:
        if place.is_file():
            source = Source(str(place), place.name)
            entries = ((StepKey(step, split), values) for step, split, values in read_log(source, LogNotes(notes)))
            return values_by_step(entries, source.name, notes)
    return None


def _read(source: Source, *, text: bool) -> File:
    with open_parquet(source) as parquet, reading(source.name, "the file"):
        tables, held = [], 0
        names = parquet.schema_arrow.names
        if tuple(names[:3]) != _FIRST or _LAST not in names:
            raise InputError(f"{source.name}: not a completions file of TRL: it has the columns {', '.join(names[:9])}")
        for batch in batches(parquet, source):
            held += batch.nbytes
            if held > _MOST_BYTES:
                raise InputError(f"{source.name}: more than {_MOST_BYTES >> 30} GiB in one step; that is no log of TRL")
            tables.append(batch)
        table = pa.Table.from_batches(tables, schema=parquet.schema_arrow)
    steps = set(table["step"].to_pylist()) if pa.types.is_integer(table.schema.field("step").type) else set()
    if len(steps) != 1 or not isinstance(step := next(iter(steps)), int) or step < 0:
        raise InputError(f"{source.name}: expected the rows of one step, found {_steps_found(table)}")
    between = names[3 : names.index(_LAST)]
    numbers = {}
    for name in between:
        kind = table.schema.field(name).type
        # A function that scored no row of a step leaves nulls, of which the file does not say what they would be.
        if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind):
            numbers[name] = table[name].cast(pa.float64(), safe=False).to_numpy()
    if not pa.types.is_floating(table.schema.field(_LAST).type):
        raise InputError(f"{source.name}: the column advantage holds no numbers")
    kinds = {name: str(table.schema.field(name).type) for name in between if name not in numbers}
    return File(
        step=step,
        prompts=table["prompt"].to_pylist(),
        completions=table["completion"].to_pylist() if text else [],
        advantage=table[_LAST].cast(pa.float64()).to_numpy(),
        numbers=numbers,
        name=source.name,
        kinds=kinds,
        truths=table["solution"].to_pylist() if text and "solution" in between else (),
    )


def _steps_found(table: pa.Table) -> str:
    kind = table.schema.field("step").type
    if not pa.types.is_integer(kind):
        return f"a column step of {kind}"
    return f"the steps {sorted(map(str, set(table['step'].to_pylist())))[:5]}"


def _words(cell: object) -> object:
    """Text as it is; of messages their roles and contents."""
    if not isinstance(cell, list):
        return cell if isinstance(cell, str) or cell is None else str(cell)
    parts = [message for message in cell if isinstance(message, dict)]
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in parts)

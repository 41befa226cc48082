"""`open_run`: the files of a run, read one step at a time."""

import copy
import json
import os
from bisect import bisect_right
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.locations.paths import IN_MEMORY, Source, expand
from rolloutdoctor.io.locations.stores import address_of
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.metadata import RunMetadata, joined_ranks
from rolloutdoctor.io.metrics import LoggedMetrics, check_one_log, read_metrics
from rolloutdoctor.io.parquet.columns import NO_ALIASES, TrainerAliases
from rolloutdoctor.io.parquet.files import OpenFile, RunFile, read_footer, reading
from rolloutdoctor.io.parquet.index import RowGroup, build_index, count_rows, keys_of
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.io.parquet.token_counts import unit_of
from rolloutdoctor.io.progress import Progress, Unit, common_unit
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.results.display import Displayed
from rolloutdoctor.results.errors import InputError, SeveralRunsError

if TYPE_CHECKING:
    import torch

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.io.stream import ReadRequest

__all__ = ["LoggedMetrics", "Run", "StepRange", "open_run"]

_TEXT_ROWS = 1024
"""Rows of which the texts are read at a time."""


def open_run(
    paths: Sequence[str | os.PathLike[str]],
    *,
    trainer: str | None = None,
    aliases: TrainerAliases = NO_ALIASES,
    origins: Sequence[Source] = (),
) -> "Run":
    """Find the files of a run and read their footers and logged metrics.

    Args:
        paths: files, directories and patterns; see `paths.expand`.
        trainer: who wrote the files, for column names that depend on it; None: as their metadata say.
        aliases: trainer to its own names of columns, which mean another one elsewhere, or none.
        origins: what some of the files were made from.

    Raises:
        InputError: if nothing is found, a file cannot be read, or two files are not of one run.
        SchemaError: if a file's columns break the contract.
    """
    sources = expand(paths)
    if sources.journals:
        raise InputError(
            f"{sources.journals[0].name}: a recording that was not closed; make a run file of it (export --what run)"
        )
    files = [read_footer(source, trainer, aliases) for source in sources.files]
    metadata = agreed_metadata(files)
    if len(sources.files) > 1 and len(sources.metrics) > 1:
        check_one_log([(source.name, read_metrics([source])) for source in sources.metrics])
    notes = ReaderNotes()
    for note in (note for file in files for note in file.metadata.notes):
        notes(note)
    return Run(files, metadata, read_metrics(sources.metrics, notes), origins, sources.metrics, notes)


class Run(Displayed):
    """A run, as its files' footers describe it. No file is open except while `batches` is being consumed.

    A run without files is a log of numbers: its batches have no rows, one for each step and split that was logged.

    Attributes:
        files: names of the files as the user gave them, in reading order; of the logs, if there are only those.
        metadata: of all files; files that say nothing agree with any.
        columns: canonical names present in every file; a column of nulls only, by its type, is not present.
        partial_columns: canonical names present in some of the files: read as absent. `split` is the exception:
            files without it hold train rows, files with it are read as it says.
        rows: number of rows, from the footers.
        unit: what progress is counted in: tokens, or rows if a file has no token column.
        metrics: what the trainer logged; empty if there is none.
        dropped: steps and splits that a recorder let go in one of the files at least: no batch has them.
        incomplete: token column that some rows of a step have and others lack to the steps that were read without it,
            with a row that lacks it.
        notes: what was left out of the files, or read in doubt; every result of the run says so.
    """

    def __init__(
        self,
        files: Sequence[RunFile],
        metadata: RunMetadata,
        metrics: LoggedMetrics,
        origins: Sequence[Source] = (),
        beside: Sequence[Source] = (),
        notes: ReaderNotes | None = None,
    ) -> None:
        self._files = tuple(files)
        self._origins = tuple(origins)
        self._beside = tuple(beside)
        self.notes = ReaderNotes() if notes is None else notes
        self.files = tuple(file.name for file in files) or tuple(source.name for source in origins)
        self.metadata = metadata
        columns = [frozenset(file.columns) for file in files]
        self.columns: frozenset[str] = frozenset.intersection(*columns) if columns else frozenset()
        self.partial_columns: frozenset[str] = frozenset().union(*(file.columns for file in files)) - self.columns
        self.rows = sum(file.rows for file in files)
        self.unit: Unit = common_unit(unit_of(file) for file in files)
        self.metrics = metrics
        self.incomplete: dict[str, dict[StepKey, str]] = {}
        self.dropped = frozenset(key for file in files for key in file.metadata.dropped_steps)
        self._has_several_files = len(files) > 1
        # Of all files, also where this is a part of the run that reads some of them.
        self._whole_numbers = frozenset(name for name in ("group_id", "sample_id") if _stores_integers(files, name))

    def with_logs(self, metrics: LoggedMetrics, sources: Sequence[Source]) -> "Run":
        """Return the run with what further logs hold; where its own metrics have a value, that one stays."""
        run = copy.copy(self)
        run.metrics, run._beside = self.metrics.completed_by(metrics), (*self._beside, *sources)
        return run

    def with_metadata(self, metadata: RunMetadata) -> "Run":
        """Return the run with other metadata of its rows and metrics."""
        run = copy.copy(self)
        run.metadata = metadata
        return run

    def batches(
        self,
        columns: Iterable[str],
        *,
        steps: StepRange | None = None,
        split: str | None = None,
        dtype: "torch.dtype | None" = None,
        progress: Progress | None = None,
    ) -> "Iterator[RolloutBatch]":
        """Yield one batch per step and split, each as soon as its last row has been read.

        So batches come in the order of their last rows in the files, whatever the row groups; rows of a batch keep
        file order. Files over which steps are scattered are read in turn, in the order of their steps. A thread
        reads the next slice while the caller works on a batch, so memory stays below two steps, whatever the order of
        the rows: where the rows of a step lie far apart, what has to wait for them goes through a temporary file, at
        the cost of writing and reading it once.
        Tensors may view the memory of the file's buffers: treat them as read-only. Abandoning the iterator closes its
        files.

        Args:
            columns: canonical names to carry; those that are absent are left out, and a token column that is null in
                all rows of a batch is left out of that batch. Groups and sample names come in any case.
            steps: only these; row groups that hold none of them are not decoded.
            split: only ``train`` or ``eval``.
            dtype: of float token columns; None: float32. Files of float32 that are read as such are not copied.
            progress: called after each slice of rows with what is done and what there is to do, in `unit`.

        Raises:
            DataError: if a value breaks the contract of its column; the message names file, column and row.
            InputError: if a file is damaged.
            ValueError: if a name in `columns` is not of the contract, or `dtype` is neither float32 nor float64.
        """
        import torch

        from rolloutdoctor.io.parquet.step_chunks import ColumnSelection
        from rolloutdoctor.io.stream import ReadRequest

        dtype = dtype or torch.float32
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{dtype} where torch.float32 or torch.float64 was expected")
        wanted = ColumnSelection.of(columns, self.columns)
        if self.metrics_only:
            return self._empty_batches(steps, split)
        batches = self._stream(
            ReadRequest(wanted, steps or StepRange(), split, dtype), progress or (lambda done, total: None)
        )
        if not self.dropped:
            return batches
        # What the other ranks have of such a step is not the step.
        return (batch for batch in batches if (batch.step, batch.split) not in self.dropped)

    def __repr__(self) -> str:
        """Summarise the run in a line."""
        who = self.metadata.trainer or "unknown trainer"
        size = f"{self.rows:,} rows, {len(self.columns)} columns" if self._files else "logged metrics alone"
        more = f" and {len(self.files) - 1:,} more" if len(self.files) > 1 else ""
        return f"<Run {self.files[0] if self.files else ''}{more}: {who}, {size}>"

    @property
    def is_in_memory(self) -> bool:
        """True for rows that were given as a frame, a table or a list."""
        return IN_MEMORY in self.files

    @property
    def at_hand(self) -> "Run | None":
        """The run whose rows can be read again; None if there is none."""
        return self

    @property
    def metrics_only(self) -> bool:
        """True if there are logged metrics and no rows."""
        return not self._files

    def logged_steps(self, steps: StepRange | None, split: str | None) -> list[StepKey]:
        """Return the steps and splits at which something was logged, in order."""
        wanted = steps or StepRange()
        return [key for key in self.metrics.steps() if key.step in wanted and split in (None, key.split)]

    def ends(self) -> tuple[int, int] | None:
        """Return the first and the last step; None if there is none."""
        if self.metrics_only:
            steps = [key.step for key in self.metrics.steps()]
            return (min(steps), max(steps)) if steps else None
        return min(row_group.low for row_group in self._index), max(row_group.high for row_group in self._index)

    def _empty_batches(self, steps: StepRange | None, split: str | None) -> "Iterator[RolloutBatch]":
        import torch

        from rolloutdoctor.data.batch import RolloutBatch

        for key in self.logged_steps(steps, split):
            yield RolloutBatch(step=key.step, split=key.split, rows=torch.zeros(1, dtype=torch.int64))

    def keys(self) -> Mapping[StepKey, int]:
        """Return the steps and splits of the run, each with its number of rows.

        Only the columns `step` and `split` of row groups that hold several steps are read.

        Raises:
            DataError: if a step or a split is not valid.
            InputError: if a file cannot be read.
        """
        return {key: rows for key, rows in count_rows(self._files, self._index).items() if key not in self.dropped}

    def step_ranges(self, steps: StepRange | None, split: str | None, count: int) -> list[StepRange]:
        """Cut `steps` into at most `count` ranges that hold about equally many rows, as far as row groups tell."""
        wanted = steps or StepRange()
        weights: dict[int, float] = {}
        for row_group in self._index:
            if row_group.may_hold(wanted, split):
                # Where only the ends are known, the rows are taken to be spread evenly between them.
                points = min(row_group.high - row_group.low + 1, count)
                for point in range(points):
                    step = row_group.low + (row_group.high - row_group.low) * (2 * point + 1) // (2 * points)
                    weights[step] = weights.get(step, 0.0) + row_group.rows / points
        inside = sorted((step, weight) for step, weight in weights.items() if step in wanted)
        total, before = sum(weight for _, weight in inside), 0.0
        cuts: list[int] = []
        for (step, weight), (after, _) in pairwise(inside):
            before += weight
            if before >= total * (len(cuts) + 1) / count and after > step:
                cuts.append(after)
        cuts = cuts[: count - 1]
        return [StepRange(start, stop) for start, stop in pairwise([wanted.start, *cuts, wanted.stop])]

    def identifier_type(self, name: str) -> pa.DataType:
        """Return the type that identifiers go back to: int64 if every file stores integers, else string.

        Args:
            name: `group_id` or `sample_id`.
        """
        return pa.int64() if name in self._whole_numbers else pa.string()

    def parts(self, steps: StepRange | None, split: str | None, count: int) -> list[tuple[StepRange, "Run"]]:
        """Cut the run into at most `count` parts of whole steps that hold about equally many rows.

        A part reads only the files that may hold its steps, and is otherwise the run: with its columns, its metadata,
        its logged metrics, and its names of rows. The work is linear in the row groups where steps are in order.
        """
        ranges = self.step_ranges(steps, split, count)
        starts = [each.start or 0 for each in ranges]
        held: list[list[RowGroup]] = [[] for _ in ranges]
        for row_group in self._index:
            first = max(0, bisect_right(starts, row_group.low) - 1)
            for place in range(first, bisect_right(starts, row_group.high)):
                if row_group.may_hold(ranges[place], split):
                    held[place].append(row_group)
        return [(each, self._reading(groups)) for each, groups in zip(ranges, held, strict=True)]

    def _reading(self, row_groups: Sequence[RowGroup]) -> "Run":
        """The run, of which only these row groups are read."""
        # Without a row there is still a file, or it would be a run of logged metrics alone.
        numbers = sorted({row_group.file for row_group in row_groups}) or list(range(len(self._files)))[:1]
        place = {number: at for at, number in enumerate(numbers)}
        part = copy.copy(self)
        part._files = tuple(_anchored(self._files[number]) for number in numbers)
        part._origins, part._beside, part.incomplete = (), (), {}
        part.files = tuple(file.name for file in part._files) or self.files[:1]
        part.rows = sum(row_group.rows for row_group in row_groups)
        part._index = tuple(replace(row_group, file=place[row_group.file]) for row_group in row_groups)
        return part

    def size(self, steps: StepRange | None = None, split: str | None = None) -> int:
        """Count the tokens or rows, as `unit` says, of the row groups that may hold these steps."""
        wanted = steps or StepRange()
        return sum(row_group.size(self.unit) for row_group in self._index if row_group.may_hold(wanted, split))

    def decoded_bytes(self) -> int:
        """About how many bytes the row groups take once they are decoded, from the footers."""
        return sum(_decoded(file, group) for file in self._files for group in range(len(file.chunks)))

    def largest_row_group(self) -> int:
        """Bytes of the largest row group once it is decoded, from the footers."""
        index = self._index
        return max((_decoded(self._files[each.file], each.group) for each in index), default=0)

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns of the first file that mean nothing here."""
        return self._files[0].unread if self._files else ()

    def stored_files(self) -> tuple[RunFile, ...]:
        """Return the footers of the files, in reading order."""
        return self._files

    def reads(self, path: "str | os.PathLike[str]") -> bool:
        """Tell whether a path is, under any name, a file that the run was read from.

        Raises:
            UsageError: if nothing could be written there.
        """
        return Target.of(path).is_any(self.inputs)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths of what the run was read from: its files or the dump, folders of it too, and logged metrics."""
        sources = (*self._origins, *(file.source for file in self._files), *self._beside)
        return tuple(source.path for source in sources)

    def texts(
        self, rows: Mapping[StepKey, Collection[int]], names: Sequence[str] = ("prompt", "response")
    ) -> dict[tuple[StepKey, int], dict[str, object]]:
        """Read `prompt` and `response` of a few rows, as stored; what a file lacks is left out.

        Args:
            rows: step and split to numbers of rows in the batch of that step.
            names: of the columns.
        """
        texts: dict[tuple[StepKey, int], dict[str, object]] = {}
        names = [name for name in names if name in self.columns]
        offsets = dict.fromkeys(rows, 0)
        for number, file in enumerate(self._files if names else ()):
            row_groups = [
                row_group for row_group in self._index if row_group.file == number and _holds_any(row_group, rows)
            ]
            if not row_groups:
                continue
            with file.opened() as opened:
                for row_group in row_groups:
                    at: dict[int, tuple[StepKey, int]] = {}
                    for key, places in keys_of(opened, row_group.group, row_group.numbers):
                        if key in rows:
                            inside = (row for row in rows[key] if offsets[key] <= row < offsets[key] + len(places))
                            at.update((int(places[row - offsets[key]]), (key, row)) for row in inside)
                            offsets[key] += len(places)
                    texts.update(_texts_at(opened, row_group.group, names, at))
        return texts

    @cached_property
    def _index(self) -> tuple[RowGroup, ...]:
        return build_index(self._files)

    def _stream(self, request: "ReadRequest", progress: Progress) -> "Generator[RolloutBatch, None, None]":
        from rolloutdoctor.io.stream import read_steps

        yield from read_steps(
            self._files, self._index, request, progress, self.unit, self._note, several_files=self._has_several_files
        )

    def _note(self, batch: "RolloutBatch") -> None:
        for name, where in batch.incomplete.items():
            self.incomplete.setdefault(name, {})[batch.key] = where


def _decoded(file: RunFile, group: int) -> int:
    return sum(chunk.uncompressed for chunk in file.chunks[group])


def _anchored(file: RunFile) -> RunFile:
    """The file under a path that holds in other folders, too."""
    if address_of(file.source.path) is not None:
        return file
    return replace(file, source=replace(file.source, path=str(Path(file.source.path).absolute())))


def _stores_integers(files: Sequence[RunFile], name: str) -> bool:
    """True if every file stores the identifier as an integer."""
    stored = [file.columns[name].type for file in files if name in file.columns]
    values = [type_.value_type if pa.types.is_dictionary(type_) else type_ for type_ in stored]
    return len(values) == len(files) and all(pa.types.is_integer(type_) for type_ in values)


def _texts_at(
    opened: OpenFile, group: int, names: Sequence[str], at: Mapping[int, tuple[StepKey, int]]
) -> Iterator[tuple[tuple[StepKey, int], dict[str, object]]]:
    """Read the texts of some rows of a row group, given by their places in it."""
    start = 0
    for table in opened.slices([group], names, _TEXT_ROWS) if at else ():
        with reading(opened.file.name, "the text"):
            for place, row in at.items():
                if start <= place < start + table.num_rows:
                    yield row, {name: table.column(name)[place - start].as_py() for name in names}
        start += table.num_rows


def _holds_any(row_group: RowGroup, keys: Iterable[StepKey]) -> bool:
    return any(row_group.may_hold(StepRange(key.step, key.step + 1), key.split) for key in keys)


def agreed_metadata(files: Sequence[RunFile]) -> RunMetadata:
    """Return what all files say, of the ranks together; a file that says nothing agrees with any.

    Raises:
        SeveralRunsError: if two files differ in trainer, version or an option.
    """
    speaking = [file for file in files if file.metadata != RunMetadata()]
    if not speaking:
        return RunMetadata()
    first = speaking[0]
    statements = _statements(first.metadata)
    for other in speaking[1:]:
        says = _statements(other.metadata)
        for option in [*statements, *(option for option in says if option not in statements)]:
            if statements.get(option, _UNSET) != says.get(option, _UNSET):
                raise SeveralRunsError(
                    f"{first.name} and {other.name} are not of one run: {option} is "
                    f"{statements.get(option, _UNSET)} in the first and {says.get(option, _UNSET)} in the second; "
                    "give one of them, or check them with --each"
                )
    recording = {key: value for key, value in first.metadata.recording.items() if key not in ("ranks", "world_size")}
    return replace(first.metadata, recording=recording | joined_ranks(file.metadata for file in files))


_UNSET = "not set"


def _statements(metadata: RunMetadata) -> dict[str, str]:
    statements = {"trainer": metadata.trainer, "trainer_version": metadata.trainer_version, **metadata.config}
    return {option: json.dumps(value, sort_keys=True) for option, value in statements.items() if value is not None}

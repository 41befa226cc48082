"""States of any command: a run is measured and its state saved; states of its parts take the place of the run."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, cast

import polars as pl

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.gathering import Gathered, Gathering
from rolloutdoctor.engine.identified_options import ORIGIN
from rolloutdoctor.engine.merged import check_disjoint, saved_state
from rolloutdoctor.engine.part_states import run_identity
from rolloutdoctor.engine.parts import Executor, Work, tree_sum
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.state_file import LOGGED, GatheredPart, SavedState
from rolloutdoctor.engine.stored import State
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.io.run import Run, StepRange, open_run
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, UsageError

if TYPE_CHECKING:
    import torch

    from rolloutdoctor.data.batch import RolloutBatch

_LOGGED = {"step": pl.Int64(), "split": pl.String(), "name": pl.String(), "value": pl.Float64()}


@dataclass(frozen=True)
class Saving:
    """Measures a run as another executor does, and saves the state.

    Attributes:
        executor: where parts are measured.
        command: as the user wrote it.
        save: takes the state.
    """

    executor: Executor
    command: str
    save: Callable[[SavedState], None]

    def measure(
        self,
        work: Work[State],
        run: Run,
        steps: StepRange | None = None,
        split: str | None = None,
        progress: Progress | None = None,
    ) -> list[State]:
        """See `Executor`.

        Raises:
            UsageError: if an option was identified from the rows: those of another part may show another value.
        """
        assert isinstance(work, Gathering), "what is saved is what `gather` gathers"
        identified = [name for layer in work.options.layers if layer.origin == ORIGIN for name in layer.values]
        if identified:
            raise UsageError(
                f"--save-state: the advantages of this part show {', '.join(identified)}, and those of another may "
                "show something else; state it with --set in all parts"
            )
        whole = tree_sum(self.executor.measure(work, run, steps, split, progress))
        self.save(_saved(work, run, steps or StepRange(), split, self.command, whole))
        return cast(list[State], [whole])


def _saved(work: Gathering, run: Run, steps: StepRange, split: str | None, command: str, whole: Gathered) -> SavedState:
    keys = {key: rows for key, rows in run.keys().items() if key.step in steps}
    seen = tuple(sorted(key for key in keys if split in (None, key.split)))
    metrics = run.metrics
    lines = [(*key, *value) for key in metrics.steps() for value in metrics.at(key).items() or ((None, None),)]
    tables = {**whole.tables, LOGGED: pl.DataFrame(lines, _LOGGED, orient="row")}
    part = GatheredPart(
        command=command,
        work=work.identity(),
        whole=run_identity(run),
        ends=run.ends(),
        files=tuple(
            (file.source.path, file.stamp()) for _, part in run.parts(None, None, 1) for file in part.stored_files()
        ),
        keys=tuple((*key, rows) for key, rows in sorted(keys.items())),
        unread=run.unread,
        digits=metrics.digits(),
        lines=metrics.lines,
        facts=metrics.facts,
        gathered=replace(whole, rules=RunState(), tables=tables),
    )
    state = whole.rules if work.measured else RunState(seen=seen)
    return replace(saved_state(prepare(run, work.options, lenient=work.lenient), state), part=part)


@dataclass(frozen=True)
class SavedParts:
    """Gives back what was measured of the parts of a run.

    Attributes:
        parts: the name of each state in messages, and the state, in the order of their steps.
    """

    parts: Sequence[tuple[str, SavedState]]

    def measure(
        self,
        work: Work[State],
        run: Run,
        steps: StepRange | None = None,
        split: str | None = None,
        progress: Progress | None = None,
    ) -> list[State]:
        """See `Executor`.

        Raises:
            UsageError: if a state is of other work.
        """
        states = []
        for name, saved in self.parts:
            part = _part(name, saved)
            if part.work != work.identity():
                raise UsageError(
                    f"{name} was saved by `{part.command}`: give the command the same options again, all but --steps, "
                    "or save every part with these"
                )
            states.append(work.usable(cast(State, replace(part.gathered, rules=saved.state))))
        return states


def _part(name: str, saved: SavedState) -> GatheredPart:
    if saved.part is None:
        raise UsageError(f"{name} is the state of a check; `rolloutdoctor check` reads it")
    return saved.part


class SavedRun(Run):
    """A run as the states of its parts know it, without its rows."""

    def __init__(self, parts: Sequence[tuple[str, SavedState]]) -> None:
        """Put together what the parts know.

        Raises:
            UsageError: if one is the state of a check, or given twice.
            InputError: if they are parts of several runs, or overlap.
        """
        (name, first), *others = parts
        part = _part(name, first)
        for other_name, other in others:
            if _part(other_name, other).whole != part.whole:
                raise InputError(
                    f"{name} and {other_name} are not parts of one run: its columns, what its files say of it, or its "
                    "logged metrics differ; give each command all files and the log of the run, and other --steps"
                )
            if other.files != first.files and "sample_id" not in first.columns:
                raise InputError(
                    f"{name} and {other_name} are of other files, whose rows have no sample_id to tell them by; give "
                    "each command all files of the run, and other --steps"
                )
        check_disjoint(parts)
        notes = _SavedNotes(first.unread)
        for sentence in (sentence for _, saved in parts for sentence in saved.notes):
            notes(sentence)
        super().__init__((), first.metadata, _metrics(part), notes=notes)
        self.files = tuple(dict.fromkeys(file for _, saved in parts for file in saved.files))
        self.columns = first.columns
        keys = (key for each in parts for key in _part(*each).keys)
        self._keys = {StepKey(step, split): rows for step, split, rows in keys}
        self.rows = sum(self._keys.values())
        self._ends, self._unread = part.ends, part.unread
        self._stamps = {path: stamp for each in parts for path, stamp in _part(*each).files}

    @property
    def metrics_only(self) -> bool:
        """See `Run`."""
        return False

    @property
    def unread(self) -> tuple[str, ...]:
        """See `Run`."""
        return self._unread

    def ends(self) -> tuple[int, int] | None:
        """See `Run`."""
        return self._ends

    def keys(self) -> Mapping[StepKey, int]:
        """See `Run`."""
        return self._keys

    def size(self, steps: StepRange | None = None, split: str | None = None) -> int:
        """See `Run`; nothing is left to be read."""
        return 0

    def batches(
        self,
        columns: Iterable[str],
        *,
        steps: StepRange | None = None,
        split: str | None = None,
        dtype: "torch.dtype | None" = None,
        progress: Progress | None = None,
    ) -> "Iterator[RolloutBatch]":
        """See `Run`.

        Raises:
            InputError: if the files are not where they were, or were written again.
        """
        if self.at_hand is None:
            raise InputError(f"{self.files[0]}: a saved state has no rows, and these are needed; name the run itself")
        return self.at_hand.batches(columns, steps=steps, split=split, dtype=dtype, progress=progress)

    def texts(
        self, rows: Mapping[StepKey, Collection[int]], names: Sequence[str] = ("prompt", "response")
    ) -> dict[tuple[StepKey, int], dict[str, object]]:
        """See `Run`; none where the files are not at hand."""
        return {} if self.at_hand is None else self.at_hand.texts(rows, names)

    @cached_property
    def at_hand(self) -> Run | None:
        """The run itself, if its files are where they were when its parts were measured, and were not written again."""
        try:
            run = open_run(list(self._stamps), trainer=self.metadata.trainer)
        except RolloutDoctorError:
            return None
        stamps = {file.source.path: file.stamp() for file in run.stored_files()}
        return run if (stamps, run.columns) == (self._stamps, self.columns) else None


class _SavedNotes(ReaderNotes):
    """Notes of the readers of a run, as they were."""

    def __init__(self, unread: Mapping[str, str]) -> None:
        super().__init__()
        self._unread = unread

    @property
    def unread(self) -> Mapping[str, str]:
        """See `ReaderNotes`."""
        return self._unread


def _metrics(part: GatheredPart) -> LoggedMetrics:
    values: dict[StepKey, dict[str, float]] = {}
    for step, split, name, value in part.gathered.tables[LOGGED].select(list(_LOGGED)).iter_rows():
        of_step = values.setdefault(StepKey(step, split), {})
        if name is not None:
            of_step[name] = value
    return LoggedMetrics(values, digits=part.digits, lines=part.lines, facts=part.facts)


def saved_parts(parts: Sequence[tuple[str, SavedState]]) -> tuple[SavedRun, SavedParts]:
    """Return the run whose parts were saved, and what gives back what was measured of them.

    Raises:
        UsageError: if one is the state of a check, or given twice.
        InputError: if they are parts of several runs, or overlap.
    """
    ordered = sorted(parts, key=lambda part: part[1].state.seen[:1])
    return SavedRun(ordered), SavedParts(ordered)

"""What is gathered of a run's steps, beside what its rules measure or alone: one state for every command.

A part of a run gives a `Gathered`; those of the parts are concatenated and added, in any number of parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import TYPE_CHECKING, TypeVar

import polars as pl

from rolloutdoctor.engine.logged_run import measure_log
from rolloutdoctor.engine.options import CheckOptions, ReadOptions
from rolloutdoctor.engine.parts import Executor, Part, Work, tree_sum
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.evaluation.steps_table import StepsTable
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.results.figures import AdvantagesData
from rolloutdoctor.results.histograms import Histogram

if TYPE_CHECKING:
    from rolloutdoctor.engine.gatherer import Gatherer

    OneKind = TypeVar("OneKind", bound=Gatherer)

Value = TypeVar("Value")

_RULES = "rules/"
"""Before the names of tables of the rules."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """What was gathered of some steps; that of the parts of a run is concatenated and added.

    Attributes:
        rules: what the rules measured.
        tables: name to a table.
        counts: name to a histogram.
        advantages: name to advantages, with and without a fix.
    """

    rules: RunState = field(default_factory=RunState)
    tables: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    counts: Mapping[str, Histogram] = field(default_factory=dict)
    advantages: Mapping[str, "AdvantagesData"] = field(default_factory=dict)

    def __add__(self, other: "Gathered") -> "Gathered":
        return Gathered(
            self.rules + other.rules,
            _united(self.tables, other.tables, lambda left, right: pl.concat([left, right], how="diagonal_relaxed")),
            _united(self.counts, other.counts, add),
            _united(self.advantages, other.advantages, add),
        )

    def named(self, prefix: str) -> "Gathered":
        """Return the same with names that begin with a prefix."""
        return Gathered(
            self.rules,
            _prefixed(self.tables, prefix),
            _prefixed(self.counts, prefix),
            _prefixed(self.advantages, prefix),
        )

    def under(self, prefix: str) -> "Gathered":
        """Return what `named` was given: what is under names with a prefix."""
        return Gathered(
            RunState(), _under(self.tables, prefix), _under(self.counts, prefix), _under(self.advantages, prefix)
        )

    @property
    def frames(self) -> Mapping[str, pl.DataFrame | StepsTable]:
        """All tables, those of the rules among them, by name."""
        return {**_prefixed(self.rules.frames, _RULES), **self.tables}

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "Gathered":
        """Return the same with other tables."""
        tables = {name: frame for name, frame in frames.items() if not name.startswith(_RULES)}
        return replace(self, rules=self.rules.with_frames(_under(frames, _RULES)), tables=tables)


def _united(
    left: Mapping[str, Value], right: Mapping[str, Value], both: Callable[[Value, Value], Value]
) -> dict[str, Value]:
    """Return the values of two mappings; of a name in both, both put together."""
    united = {**left, **right}
    return united | {name: both(left[name], right[name]) for name in left if name in right}


def _prefixed(values: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _under(values: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def nothing(ready: PreparedRun) -> "Sequence[Gatherer]":
    """Return what gathers nothing of a run beside its rules."""
    return ()


@dataclass(frozen=True)
class Gathering(Work[Gathered]):
    """Gathers a part of a run.

    Attributes:
        options: of the check; the steps are those of the part.
        make: function of a module that makes what gathers it, of a prepared run and of `asked`; without it the rules
            alone measure the part.
        asked: what is asked for, as plain values.
        measured: the rules measure it, too.
        lenient: as for `prepare`.
    """

    options: CheckOptions
    make: "Callable[..., Sequence[Gatherer]]" = nothing
    asked: Sequence[object] = ()
    measured: bool = True
    lenient: bool = True
    kind = Gathered

    def measure(self, part: Part, progress: Progress | None) -> Gathered:
        """Plan with what is known of the whole run, and gather the part."""
        ready = prepare(part.run, replace(self.options, steps=part.steps), lenient=self.lenient)
        gatherers = self.make(ready, *self.asked)
        rules = _read(ready, gatherers, progress, measured=self.measured)
        parts = (each.gathered().named(f"{number}/") for number, each in enumerate(gatherers))
        return sum(parts, Gathered(rules))

    def among(self, parts: int) -> "Gathering":
        """Return the same work with the part's own share of the memory."""
        return replace(self, options=replace(self.options, memory=self.options.memory.shared(parts)))

    def usable(self, state: Gathered) -> Gathered:
        """Return a state that was stored, with its rows on disk if they take more than the memory."""
        tables = state.rules.tables.within(self.options.memory)
        return replace(state, rules=replace(state.rules, tables=tables))

    def identity(self) -> str:
        """The rules, the fixes, what is gathered, and every option that says how to read."""
        options = self.options
        rules, fixes = [rule.code for rule in options.rules], [fix.label for fix in options.fixes]
        return repr(
            (self.make.__qualname__, self.asked, self.measured, rules, fixes, self.lenient, reading_identity(options))
        )


def reading_identity(options: ReadOptions) -> Sequence[object]:
    """Return the shared options that a state depends on; the steps belong to the part."""
    layers = [(layer.origin, sorted(layer.values.items(), key=lambda setting: setting[0])) for layer in options.layers]
    return (options.trainer, layers, options.split, options.device, options.dtype)


def measure(ready: PreparedRun, progress: Progress | None = None, executor: Executor | None = None) -> RunState:
    """Let the rules measure every step of a run, and gather nothing else; see `gather`."""
    return gather(ready, nothing, progress=progress, executor=executor)[0]


def gather(
    ready: PreparedRun,
    make: "Callable[..., Sequence[OneKind]]",
    *asked: object,
    progress: Progress | None = None,
    executor: Executor | None = None,
    measured: bool = True,
    lenient: bool = True,
) -> "tuple[RunState, Sequence[OneKind]]":
    """Gather a run; return what its rules measured in the same pass, if they did, and the gatherers, which have it all.

    Args:
        ready: the run.
        make: function of a module that makes what gathers it, of a prepared run and of `asked`.
        asked: what is asked for, as plain values.
        progress: called with what is done and what there is to do, in the run's `unit`.
        executor: where parts are measured; None: in this process.
        measured: the rules measure it, too.
        lenient: as for `prepare`.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read or breaks the contract, or a part cannot be measured.
    """
    gatherers = make(ready, *asked)
    if executor is None or ready.run.metrics_only:
        return _read(ready, gatherers, progress, measured=measured), gatherers
    work = Gathering(ready.options, make, asked, measured, lenient)
    gathered = tree_sum(executor.measure(work, ready.run, ready.options.steps, ready.options.split, progress))
    for number, each in enumerate(gatherers):
        each.take(gathered.under(f"{number}/"))
    return gathered.rules, gatherers


def _read(
    ready: PreparedRun, gatherers: "Sequence[Gatherer]", progress: Progress | None, *, measured: bool
) -> RunState:
    """Pass every step to the gatherers and, if they are to measure it, to the rules; return what these measured."""
    is_log = measured and ready.run.metrics_only
    if is_log and not gatherers:
        return measure_log(ready)
    # A log alone is judged without torch, which these import.
    from rolloutdoctor.engine.accumulate import RuleAccumulator
    from rolloutdoctor.engine.run_steps import run_file_steps
    from rolloutdoctor.engine.table_builder import TableBuilder

    plan, options = ready.plan, ready.options
    rules = [RuleAccumulator(plan, TableBuilder(plan, options.memory))] if measured and not is_log else []
    run_file_steps(ready.run, [*rules, *gatherers], options, ready.metrics, progress)
    return measure_log(ready) if is_log else rules[0].state() if rules else RunState()

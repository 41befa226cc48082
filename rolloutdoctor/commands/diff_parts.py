"""What `diff` keeps of a part of a run: it adds up to the same in any order, steps in step order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rolloutdoctor.commands.breakdown import Key, part_rows
from rolloutdoctor.commands.diff_stats import Change, row_changes, tallies
from rolloutdoctor.commands.figures import AdvantagesFigure, Bands
from rolloutdoctor.commands.needs import absent_columns, evaluation_columns, need_trainer
from rolloutdoctor.commands.top_groups import Candidate, most_moved, ranked
from rolloutdoctor.data.batch import TRAIN, StepKey
from rolloutdoctor.engine.check_parts import reading_identity
from rolloutdoctor.engine.comparable import comparable
from rolloutdoctor.engine.configure import Configured, configure, read_settings
from rolloutdoctor.engine.merged_ids import MergedCount, MergedIds, merged_notes
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.engine.parts import Part, Work
from rolloutdoctor.engine.plain_records import frozen, thawed
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.prepare import run_context
from rolloutdoctor.engine.run_steps import EvaluatedStep, StepConsumer, run_file_steps
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.hypotheses.fixes import ChosenFix
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.results.comparison import MovedGroup, MovedRow, Pair
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import Band
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.base import counted


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ReadOptions):
    """What to compare, and how; an evaluation trains nothing, so the two splits are never mixed.

    Attributes:
        fixes: the other side has these.
        against: ``KEY=VALUE`` texts: the other side's options, where they differ.
        by: break the numbers down by this: a name in `parts.PARTS`.
        top: how many of the groups that moved most to keep.
        text: read the prompts and responses of these.
        distribution: keep the distribution of the advantages, before and after.
    """

    split: str = TRAIN
    fixes: Sequence[ChosenFix] = ()
    against: Sequence[str] = ()
    by: str | None = None
    top: int = 0
    text: bool = False
    distribution: bool = False


@dataclass(frozen=True)
class FoldState:
    """What separates one side from the run as configured.

    Attributes:
        steps: of each step, its tally and the metrics of both sides.
        parts: tallies by part and step, of a kind that is not the step.
        candidates: groups that may be among those that moved most.
        keep: how many of these.
        by_gradient: True if groups moved in the gradient.
    """

    steps: dict[StepKey, tuple[Change, dict[str, Pair]]] = field(default_factory=dict)
    parts: dict[Key, dict[StepKey, Change]] = field(default_factory=dict)
    candidates: list[Candidate] = field(default_factory=list)
    keep: int = 0
    by_gradient: bool = False

    def __add__(self, other: "FoldState") -> "FoldState":
        keep = max(self.keep, other.keep)
        parts = {key: {**self.parts.get(key, {}), **other.parts.get(key, {})} for key in {**self.parts, **other.parts}}
        return FoldState(
            self.steps | other.steps,
            parts,
            ranked([*self.candidates, *other.candidates], keep),
            keep,
            self.by_gradient or other.by_gradient,
        )

    def part_totals(self) -> dict[Key, Change]:
        """The tally of each part, whose steps are added in step order."""
        return {key: Change.of_all(one for _, one in sorted(steps.items())) for key, steps in self.parts.items()}


@dataclass(frozen=True)
class DiffState:
    """What is kept of a part of a run.

    Attributes:
        input: what was read.
        folds: label of a side to what separates it.
        failed: reason to the steps that could not be evaluated.
        merged: groups that are one to the trainer.
        figure: the advantages, or None.
    """

    input: InputSummary
    folds: dict[str, FoldState]
    failed: dict[str, list[int]]
    merged: MergedCount
    figure: AdvantagesFigure | None

    def __add__(self, other: "DiffState") -> "DiffState":
        one, two = self.input, other.input
        figures = [each for each in (self.figure, other.figure) if each is not None]
        reasons = {**self.failed, **other.failed}
        return DiffState(
            InputSummary(one.rows + two.rows, one.steps + two.steps, one.groups + two.groups, one.tokens + two.tokens),
            {label: fold + other.folds[label] for label, fold in self.folds.items()},
            {why: [*self.failed.get(why, []), *other.failed.get(why, [])] for why in reasons},
            self.merged + other.merged,
            sum(figures[1:], figures[0]) if figures else None,
        )

    def notes(self) -> list[str]:
        """Which steps could not be evaluated, and why, and which groups are one to the trainer."""
        failures = [
            f"{counted(len(steps), 'step')} could not be evaluated, the first is step {min(steps)}: {why}"
            for why, steps in sorted(self.failed.items())
        ]
        return failures + merged_notes(self.merged)


KINDS: Mapping[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (FoldState, Change, Pair, Candidate, MovedGroup, MovedRow, InputSummary, MergedCount, Histogram, Band)
} | {"Bands": Bands}


@dataclass(frozen=True)
class DiffWork(Work[DiffState]):
    """Compares the sides of a part.

    Attributes:
        options: of the comparison, with what was identified in the whole run; the steps are those of the part.
    """

    options: DiffOptions

    def measure(self, part: Part, progress: Progress | None) -> DiffState:
        """Compare with what is known of the whole run."""
        run, options = part.run, replace(self.options, steps=part.steps)
        configured = need_trainer(configure(run.metadata, options.trainer, options.layers))
        metrics = comparable(run.metrics, configured)
        sides = sides_of(run, configured, options)
        columns, _ = columns_of(run, metrics, configured, sides)
        seen = _Sides(configured, options, sides, columns)
        run_file_steps(run, [seen], options, metrics, progress)
        return seen.state()

    def dumped(self, state: DiffState) -> Any:  # noqa: ANN401  # any JSON
        """Every number, as plain values."""
        figure = state.figure
        return frozen(
            {
                "input": state.input,
                "folds": state.folds,
                "failed": state.failed,
                "merged": state.merged,
                "figure": None if figure is None else dict(sorted(vars(figure).items())),
            }
        )

    def loaded(self, plain: Any) -> DiffState:  # noqa: ANN401  # any JSON
        """The state that was given to `dumped`."""
        found = thawed(plain, KINDS)
        if found["figure"] is not None:
            figure = AdvantagesFigure(None)
            vars(figure).update(found["figure"])
            found["figure"] = figure
        return DiffState(**found)

    def identity(self) -> str:
        """The changes, and every option that says how to read."""
        options = self.options
        fixes = [fix.label for fix in options.fixes]
        more = (options.by, options.top, options.distribution)
        return repr(("diff", fixes, tuple(options.against), more, reading_identity(options)))


def sides_of(run: Run, configured: Configured, options: DiffOptions) -> dict[str, Objective]:
    """The run as configured, then all changes together, then each alone."""
    changed = configured.objective
    alone: dict[str, Objective] = {}
    if options.against:
        layer = read_settings(options.against, "--against")
        other = need_trainer(configure(run.metadata, options.trainer, [layer, *options.layers]))
        changed = other.objective
        alone[", ".join(f"{key}={value}" for key, value in layer.values.items())] = changed
    for fix in options.fixes:
        changed = fix.apply(changed)
        alone[fix.label] = fix.apply(configured.objective)
    sides = {AS_CONFIGURED: configured.objective, " + ".join(alone): changed}
    return sides if len(alone) == 1 else sides | alone


def columns_of(
    run: Run, metrics: LoggedMetrics, configured: Configured, sides: Mapping[str, Objective]
) -> tuple[frozenset[str], list[str]]:
    """What to read, and what the numbers lack."""
    context = run_context(run, metrics, configured)
    needed = frozenset().union(*(advantage_columns(objective) for objective in sides.values()))
    absent = absent_columns(run, needed)
    if absent:
        word = "column" if len(absent) == 1 else "columns"
        raise InputError(
            f"{run.files[0]}: nothing can be compared without the {word} {', '.join(absent)}; {remedy(absent, context)}"
        )
    wanted = frozenset().union(*(evaluation_columns(objective) for objective in sides.values()))
    absent = absent_columns(run, frozenset().union(*(loss_columns(objective) for objective in sides.values())))
    notes = []
    if absent:
        notes.append(
            f"without {', '.join(absent)} there is no loss: only advantages are compared; {remedy(absent, context)}"
        )
    return wanted & run.columns, notes


def _metrics(configured: Configured, evaluation: Evaluation) -> Mapping[str, float]:
    return dict(configured.trainer.metrics(evaluation)) if len(evaluation.batch) else {}


class _Sides(StepConsumer):
    """All sides of a comparison, step by step."""

    def __init__(
        self,
        configured: Configured,
        options: DiffOptions,
        sides: Mapping[str, Objective],
        columns: frozenset[str],
    ) -> None:
        self.columns, self.objectives, self.split = columns, sides, options.split
        self.folds = {label: _Fold(configured, options) for label in sides if label != AS_CONFIGURED}
        self._figure = AdvantagesFigure(next(iter(self.folds))) if options.distribution else None
        self.input = InputSummary()
        self._configured = configured
        self._failed: dict[str, list[int]] = {}
        self._merged = MergedIds(sides.values())

    def add(self, step: EvaluatedStep) -> None:
        """Count a step."""
        batch, seen = step.batch, self.input
        groups = 0 if batch.groups is None else len(batch.groups)
        self.input = InputSummary(
            seen.rows + len(batch), seen.steps + 1, seen.groups + groups, seen.tokens + batch.tokens
        )
        if step.failure is not None:
            self._failed.setdefault(step.failure, []).append(batch.step)
            return
        self._merged.add(batch)
        found = step.evaluations
        before = _metrics(self._configured, found[AS_CONFIGURED])
        for label, fold in self.folds.items():
            fold.add(found[AS_CONFIGURED], before, found[label])
        if self._figure is not None and batch.has("response_mask"):
            self._figure.add(step)

    def state(self) -> DiffState:
        """What was counted."""
        folds = {label: fold.state() for label, fold in self.folds.items()}
        return DiffState(self.input, folds, self._failed, self._merged.count, self._figure)


class _Fold:
    """Adds up, step by step, what separates one side from the run as configured."""

    def __init__(self, configured: Configured, options: DiffOptions) -> None:
        self._configured, self._options = configured, options
        self._steps: dict[StepKey, tuple[Change, dict[str, Pair]]] = {}
        self._parts: dict[Key, dict[StepKey, Change]] = {}
        self.candidates: list[Candidate] = []
        self._by_gradient = False

    def add(self, before: Evaluation, metrics: Mapping[str, float], after: Evaluation) -> None:
        """Count a step."""
        batch = before.batch
        changes = row_changes(before, after)
        everyone_N = torch.zeros(len(batch), dtype=torch.int64)
        (total,) = tallies(changes, everyone_N, 1)
        if "versus_l1" in changes:
            total = replace(total, steps=1.0)
            self._by_gradient = True
        other = _metrics(self._configured, after)
        pairs = {name: Pair(value, other[name]) for name, value in metrics.items() if name in other}
        self._steps[batch.key] = (total, pairs)
        if self._options.by is not None and self._options.by != "step":
            keys, index_N = part_rows(self._options.by, batch)
            for key, change in zip(keys, tallies(changes, index_N, len(keys)), strict=True):
                self._parts.setdefault(key, {})[batch.key] = change
        if self._options.top:
            self.candidates = most_moved(self.candidates, batch, changes, self._options.top)

    def state(self) -> FoldState:
        """What was counted."""
        return FoldState(self._steps, self._parts, list(self.candidates), self._options.top, self._by_gradient)

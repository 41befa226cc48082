"""`diff`: a run computed as configured and with changes, side by side."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rolloutdoctor.commands.breakdown import PARTS, Key, part_rows, part_slices
from rolloutdoctor.commands.diff_stats import Change, measures, row_changes, tallies
from rolloutdoctor.commands.figures import AdvantagesFigure
from rolloutdoctor.commands.recompute import absent_columns, evaluation_columns, need_trainer
from rolloutdoctor.commands.top_groups import Candidate, most_moved, moved_groups
from rolloutdoctor.data.batch import TRAIN, StepKey
from rolloutdoctor.engine.comparable import comparable
from rolloutdoctor.engine.configure import Configured, configure, read_settings
from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.merged_ids import MergedIds
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.prepare import run_context
from rolloutdoctor.engine.run_steps import AS_CONFIGURED, EvaluatedStep, StepConsumer, run_file_steps
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.hypotheses.fixes import ChosenFix
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.ops.tally import ratio
from rolloutdoctor.results.comparison import Comparison, Effect, Pair, Slice
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.exact import mean
from rolloutdoctor.results.figures import AdvantagesData
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.base import counted

BY_GRADIENT = "absolute change of the log-prob gradient"
BY_ADVANTAGE = "absolute change of advantages"


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


def diff(run: Run, options: DiffOptions, progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Compare a run as configured with the same run under fixes, other options, or both.

    Raises:
        UsageError: if an option cannot be used, or there is nothing to compare.
        InputError: if a file cannot be read, breaks the contract, or lacks what the advantages need.
    """
    if not options.fixes and not options.against:
        raise UsageError("nothing to compare with: add --fix NAME (see `rolloutdoctor fixes`) or --against KEY=VALUE")
    if options.by is not None and options.by not in PARTS:
        raise UsageError(f"no parts by {options.by!r} (known: {', '.join(PARTS)})")
    options = with_identified(run, options)
    configured = need_trainer(configure(run.metadata, options.trainer, options.layers))
    metrics = comparable(run.metrics, configured)
    sides = _sides(run, configured, options)
    columns, notes = _columns(run, metrics, configured, sides)
    seen = _Sides(configured, options, sides, columns)
    run_file_steps(run, [seen], options, metrics, progress)
    if not seen.input.rows:
        raise UsageError(f"no {options.split} rows to compare; widen --steps or set --split")
    notes += seen.notes()
    folds = seen.folds
    effects = [fold.effect(label, joint=not at and len(folds) > 1) for at, (label, fold) in enumerate(folds.items())]
    if options.top:
        groups_moved = moved_groups(run, next(iter(folds.values())).candidates, text=options.text)
        effects[0] = replace(effects[0], groups=groups_moved)
    return Comparison(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=seen.input,
        trainer=configured.trainer.name,
        trainer_version=configured.version,
        config=configured.settings(),
        by=options.by,
        effects=tuple(effects),
        notes=tuple(notes),
        advantages=seen.distribution(),
    )


def _sides(run: Run, configured: Configured, options: DiffOptions) -> dict[str, Objective]:
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


def _columns(
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

    def distribution(self) -> AdvantagesData | None:
        """The advantages as configured and under all changes together."""
        return None if self._figure is None else self._figure.data()

    def notes(self) -> list[str]:
        """Which steps could not be evaluated, and why, and which groups are one to the trainer."""
        failures = [
            f"{counted(len(steps), 'step')} could not be evaluated, the first is step {min(steps)}: {why}"
            for why, steps in sorted(self._failed.items())
        ]
        return failures + self._merged.notes()


class _Fold:
    """Adds up, step by step, what separates one side from the run as configured."""

    def __init__(self, configured: Configured, options: DiffOptions) -> None:
        self._configured, self._options = configured, options
        self._steps: list[tuple[StepKey, Change, Mapping[str, Pair]]] = []
        self._parts: dict[Key, Change] = {}
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
        self._steps.append((batch.key, total, pairs))
        if self._options.by is not None and self._options.by != "step":
            keys, index_N = part_rows(self._options.by, batch)
            for key, change in zip(keys, tallies(changes, index_N, len(keys)), strict=True):
                self._parts[key] = self._parts.get(key, Change()) + change
        if self._options.top:
            self.candidates = most_moved(self.candidates, batch, changes, self._options.top)

    def effect(self, label: str, *, joint: bool) -> Effect:
        """What came out."""
        steps = sorted(self._steps, key=lambda step: step[0])
        total = Change()
        for _, change, _ in steps:
            total = total + change
        names = dict.fromkeys(name for _, _, pairs in steps for name in pairs)
        metrics = {name: _mean([pairs[name] for _, _, pairs in steps if name in pairs]) for name in names}
        moved = any(_other(pair) for _, _, pairs in steps for pair in pairs.values())
        per_step = tuple(
            Slice({"step": key.step, "split": key.split}, measures(change), pairs) for key, change, pairs in steps
        )
        by = self._options.by
        return Effect(
            label=label,
            joint=joint,
            differs=total.differs or moved,
            total=measures(total),
            metrics=metrics,
            per_step=per_step,
            parts=() if by is None else per_step if by == "step" else part_slices(by, self._parts, total.steps),
            moved_by=BY_GRADIENT if self._by_gradient else BY_ADVANTAGE,
            remarks=tuple(_remarks(total, moved)),
        )


def _other(pair: Pair) -> bool:
    one, other = pair.before, pair.after
    return one is not None and other is not None and one != other and not (one != one and other != other)


def _mean(pairs: Sequence[Pair]) -> Pair:
    """Mean over the steps where both sides have a finite value."""
    known = [
        (pair.before, pair.after)
        for pair in pairs
        if pair.before is not None
        and pair.after is not None
        and math.isfinite(pair.before)
        and math.isfinite(pair.after)
    ]
    if not known:
        return Pair(None, None)
    return Pair(mean([one for one, _ in known]), mean([other for _, other in known]))


def _remarks(total: Change, metrics_moved: bool) -> Iterator[str]:
    if not total.differs:
        same = "advantages, loss and gradient are the same"
        yield f"only metrics change: {same}" if metrics_moved else f"nothing changes: {same}"
        return
    if total.steps and not total.versus_l1 > 0:
        yield "the gradient is the same"
    if total.rescaled:
        mean = ratio(total.weight, total.same) or math.nan
        yield (
            "the denominators change, and with them the effective learning rate of all rows: "
            f"{int(total.rescaled):,} of {int(total.same):,} otherwise unaffected rows get another loss weight, "
            f"x{mean:.4g} on average (x{total.weight_low:.4g} to x{total.weight_high:.4g})"
        )
    elif total.same:
        yield f"unaffected: {int(total.same):,} rows keep advantage and loss weight"

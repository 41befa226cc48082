"""The sides of `diff`, and what is gathered of them: totals of steps, metrics, and the groups that moved most."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import polars as pl

from rolloutdoctor.commands.diff.ablation import LeftOut, rows_without
from rolloutdoctor.commands.diff.measures import no_totals, step_totals
from rolloutdoctor.commands.diff.rows import EMPTY, side_rows, with_changes
from rolloutdoctor.commands.diff.top_groups import most_moved, no_groups, with_texts
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.breakdown import PARTS
from rolloutdoctor.engine.configure import Configured, configure, read_settings
from rolloutdoctor.engine.gatherer import Gatherer, Schemas
from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.merged_ids import MergedCount, MergedIds, merged_notes
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.prepare import PreparedRun, run_context
from rolloutdoctor.engine.requirements import absent_columns, evaluation_columns, need_trainer
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, evaluate_all
from rolloutdoctor.evaluation.joined_steps import StepsTogether
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.pictures.gather.advantages import AdvantagesFigure
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import AdvantagesData
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.rules.base import counted
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose, compared


@dataclass(frozen=True, kw_only=True)
class DiffOptions(ReadOptions):
    """Options of a diff; an evaluation trains nothing, so the two splits are never mixed.

    Attributes:
        fixes: the other side has these.
        all_fixes: every fix that can be is compared, each by itself.
        against: ``KEY=VALUE`` texts: the other side's options, where they differ.
        by: break the numbers down by this: a name in `parts.PARTS`.
        top: how many of the groups that moved most to keep.
        text: read the prompts and responses of these.
        distribution: keep the distribution of the advantages, before and after.
        without: the other side is the step without these rows or tokens.
    """

    split: str = TRAIN
    fixes: Sequence[ChosenFix] = ()
    all_fixes: bool = False
    against: Sequence[str] = ()
    by: str | None = None
    top: int = 0
    text: bool = False
    distribution: bool = False
    without: LeftOut = LeftOut()  # noqa: RUF009  # it is frozen


_ASKED = ("all_fixes", "against", "by", "top", "text", "distribution", "without")
"""Options that say what is compared, beside the fixes, as plain values."""


def asked_of(options: DiffOptions) -> Sequence[object]:
    """Return what is compared as plain values, which `sides_in` takes."""
    return (tuple(fix.label for fix in options.fixes), *(getattr(options, name) for name in _ASKED))


def sides_in(ready: PreparedRun, fixes: Sequence[str], *asked: object) -> "tuple[Sides]":
    """Return what gathers the sides of a run; see `gather` and `asked_of`."""
    settings: dict[str, Any] = dict(zip(_ASKED, asked, strict=True))
    options = DiffOptions(**ready.options.reading, fixes=tuple(map(choose, fixes)), **settings)
    configured = need_trainer(ready.configured, ready.run)
    sides = sides_of(ready.run, configured, options)
    columns, _ = columns_of(ready.run, ready.metrics, configured, sides, options.fixes)
    return (Sides(ready.run, configured, options, sides, columns),)


def sides_of(run: Run, configured: Configured, options: DiffOptions) -> dict[str, Objective]:
    """The run as configured, then all changes together, then each alone; of every fix each alone."""
    if options.without:
        return dict.fromkeys((AS_CONFIGURED, options.without.label), configured.objective)
    fixes = [fix for fix in options.fixes if not (options.all_fixes and fix.fix.of_rounding)]
    base = compared(configured.objective, fixes)
    changed = base
    alone: dict[str, Objective] = {}
    if options.against:
        layer = read_settings(options.against, "--against")
        other = need_trainer(configure(run.metadata, options.trainer, [layer, *options.layers]), run)
        # A loss that one side does not have is compared with none.
        unknown = base.unknown_loss or other.objective.unknown_loss
        base, changed = (replace(side, unknown_loss=unknown) for side in (base, compared(other.objective, fixes)))
        alone[", ".join(f"{key}={value}" for key, value in layer.values.items())] = changed
    for fix in fixes:
        changed = changed if options.all_fixes else fix.apply(changed)
        alone[fix.label] = fix.apply(base)
    if options.all_fixes:
        return {AS_CONFIGURED: base} | alone
    sides = {AS_CONFIGURED: base, " + ".join(alone): changed}
    return sides if len(alone) == 1 else sides | alone


def apart_of(configured: Configured, options: DiffOptions) -> dict[str, dict[str, Objective]]:
    """Of every fix those that are compared with another evaluation than the run as configured, and what with what."""
    objectives = {}
    for fix in options.fixes if options.all_fixes else ():
        if fix.fix.of_rounding:
            base = compared(configured.objective, [fix])
            objectives[fix.label] = {AS_CONFIGURED: base, fix.label: fix.apply(base)}
    return objectives


def columns_of(
    run: Run,
    metrics: LoggedMetrics,
    configured: Configured,
    sides: Mapping[str, Objective],
    fixes: Sequence[ChosenFix] = (),
) -> tuple[frozenset[str], list[str]]:
    """Return the columns to read, and what the numbers lack."""
    context = run_context(run, metrics, configured)
    of_fixes = frozenset().union(*(chosen.fix.columns(configured.objective) for chosen in fixes))
    needed = frozenset().union(*(advantage_columns(objective) for objective in sides.values()), of_fixes)
    absent, unknown = absent_columns(run, needed), sides[AS_CONFIGURED].unknown_loss
    of_loss = [chosen.label for chosen in fixes if chosen.fix.stage == "loss"]
    if unknown and of_loss:
        raise InputError(f"{run.files[0]}: {', '.join(of_loss)} cannot be compared: {unknown}")
    if absent:
        word = "column" if len(absent) == 1 else "columns"
        raise InputError(
            f"{run.files[0]}: nothing can be compared without the {word} {', '.join(absent)}; {remedy(absent, context)}"
        )
    wanted = frozenset().union(*(evaluation_columns(objective) for objective in sides.values()))
    absent = absent_columns(run, frozenset().union(*(loss_columns(objective) for objective in sides.values())))
    notes = []
    if unknown:
        notes.append(f"there is no loss, only advantages are compared: {unknown}")
    elif absent:
        notes.append(
            f"without {', '.join(absent)} there is no loss: only advantages are compared; {remedy(absent, context)}"
        )
    return wanted & run.columns, notes


def _metrics(configured: Configured, evaluation: Evaluation) -> Mapping[str, float]:
    return dict(configured.trainer.metrics(evaluation)) if len(evaluation.batch) else {}


_MOST_ROWS = 2**16
"""Rows that wait before they are added up."""


class Sides(Gatherer):
    """All sides of a comparison, step by step.

    Its tables are `steps`: totals of every step and changed side; `parts`: the same of the parts of a step that were
    asked for; `metrics`: the trainer's metrics of every step, as configured and on each changed side; `moved`: rows of
    the groups that moved most on the first changed side; `left`: names of the rows that were left out; `seen`: what
    each step holds, and why it could not be evaluated; `merged`: groups that are one to the trainer.
    """

    schemas: ClassVar[Schemas] = {
        "metrics": {
            **{"side": pl.String(), "step": pl.Int64(), "split": pl.String(), "metric": pl.String()},
            **{"before": pl.Float64(), "after": pl.Float64()},
        },
        "left": {"step": pl.Int64(), "split": pl.String(), "name": pl.String()},
        "seen": {
            **{"step": pl.Int64(), "split": pl.String(), "rows": pl.Int64(), "groups": pl.Int64()},
            **{"tokens": pl.Int64(), "failure": pl.String()},
        },
        "merged": {"step": pl.Int64(), "split": pl.String(), "groups": pl.Int64(), "names": pl.String()},
    }

    def __init__(
        self,
        run: Run,
        configured: Configured,
        options: DiffOptions,
        sides: Mapping[str, Objective],
        columns: frozenset[str],
    ) -> None:
        super().__init__()
        self.columns, self.objectives, self.split = columns, sides, options.split
        self._sides = [label for label in sides if label != AS_CONFIGURED]
        self._apart = apart_of(configured, options)
        self._figure = AdvantagesFigure(self._sides[0]) if options.distribution else None
        self._configured, self._options, self._run = configured, options, run if options.top and options.text else None
        self._by = PARTS.get(options.by or "step", ())
        # Of what a row is a part, where that is a number; and whether names are asked for.
        self._part = options.by if self._by == ("part",) else None
        self._named = bool(options.top) or "group_id" in self._by
        self._rows = [EMPTY]
        self._metrics: list[tuple[object, ...]] = []
        self._left: list[tuple[object, ...]] = []
        self._merged = MergedIds(sides.values())
        # All columns are there, also where no step is.
        for name in ("steps", "parts"):
            self.keep(name, no_totals())
        self.keep("moved", no_groups())
        if options.without:
            self.per_token = frozenset({AS_CONFIGURED})

    def add(self, step: EvaluatedStep) -> None:
        """Take in one step."""
        self.add_all(EvaluatedSteps([step]))

    def add_all(self, steps: EvaluatedSteps) -> None:
        """Take in some steps."""
        able = [step for step in steps.steps if self._counted(step)]
        if self._options.without:
            for step in able:
                self._leave_out(step)
        elif steps.batch is not None:
            self._compare(able, steps.evaluations)
        else:
            for step in able:
                self._compare([step], step.evaluations)
        if sum(map(len, self._rows)) > _MOST_ROWS:
            self._add_up()

    def _counted(self, step: EvaluatedStep) -> bool:
        """Count a step; True if it was evaluated."""
        batch, groups = step.batch, step.batch.groups
        sizes = {"rows": len(batch), "groups": 0 if groups is None else len(groups), "tokens": batch.tokens}
        self.line("seen", step=batch.step, split=batch.split, **sizes, failure=step.failure)
        if step.failure is not None:
            return False
        merged = self._merged.of(batch)
        if merged.first is not None:
            self.line("merged", step=batch.step, split=batch.split, groups=merged.groups, names=merged.first[1])
        if self._figure is not None and batch.has("response_mask"):
            self._figure.add(step)
        return True

    def _compare(self, steps: Sequence[EvaluatedStep], joined: Mapping[str, Evaluation]) -> None:
        """Take in all sides of a step, or of several whose evaluations as one batch are `joined`."""
        each = [step.evaluations for step in steps]
        before = [_metrics(self._configured, evaluations[AS_CONFIGURED]) for evaluations in each]
        for side in self._sides:
            self._add_side(side, joined, each, before)
        for side, objectives in self._apart.items():
            for parts, apart in self._evaluated_apart(steps, objectives):
                self._add_side(side, apart, parts, [_metrics(self._configured, part[AS_CONFIGURED]) for part in parts])

    def _evaluated_apart(
        self, steps: Sequence[EvaluatedStep], objectives: Mapping[str, Objective]
    ) -> Iterator[tuple[Sequence[Mapping[str, Evaluation]], Mapping[str, Evaluation]]]:
        """Yield the evaluations of each of some steps, and of these as one batch; or the same of each by itself."""
        batches, logged, dtype = [step.batch for step in steps], [step.logged for step in steps], steps[0].dtype
        shared = StepsTogether(batches, logged, dtype).whole(objectives) if len(steps) > 1 else None
        if shared is not None:
            yield shared.each, shared.joined
            return
        for step in steps:
            evaluations = evaluate_all(step.batch, objectives, dtype=dtype, logged=step.logged)
            yield [evaluations], evaluations

    def _add_side(
        self,
        side: str,
        joined: Mapping[str, Evaluation],
        each: Sequence[Mapping[str, Evaluation]],
        before: Sequence[Mapping[str, float]],
    ) -> None:
        """Take in the rows and metrics of a changed side."""
        pairs = [(evaluations[AS_CONFIGURED], evaluations[side]) for evaluations in each]
        self._rows.append(side_rows(side, joined[AS_CONFIGURED], joined[side], pairs, by=self._part, named=self._named))
        for metrics, (_, after) in zip(before, pairs, strict=True):
            self._add_metrics(side, metrics, after)

    def _add_metrics(self, side: str, before: Mapping[str, float], evaluation: Evaluation) -> None:
        """Take in the trainer's metrics of a changed side."""
        after, key = _metrics(self._configured, evaluation), evaluation.batch.key
        self._metrics += [(side, *key, name, x, after[name]) for name, x in before.items() if name in after]

    def _leave_out(self, step: EvaluatedStep) -> None:
        """Take in a step with and without what is left out."""
        (side,), batch = self._sides, step.batch
        evaluation, left = step.evaluations[AS_CONFIGURED], self._options.without
        before = _metrics(self._configured, evaluation)
        rows, after, shares, names = rows_without(side, evaluation, left, step.logged, by=self._part, named=self._named)
        self._rows.append(rows)
        self._metrics += [(side, *batch.key, name, *ends) for name, ends in shares.items()]
        if after is not None:
            self._add_metrics(side, before, after)
        self._left += [(*batch.key, name) for name in names]

    def _add_up(self) -> None:
        if self._metrics:
            self.keep("metrics", pl.DataFrame(self._metrics, self.schemas["metrics"], orient="row"))
        if self._left:
            self.keep("left", pl.DataFrame(self._left, self.schemas["left"], orient="row"))
        rows = pl.concat(self._rows, how="diagonal_relaxed")
        self._metrics, self._left, self._rows = [], [], [EMPTY]
        if rows.is_empty():
            return
        self.keep("steps", step_totals(rows))
        if self._by:
            self.keep("parts", step_totals(rows, self._by))
        if self._options.top:
            moved = most_moved(with_changes(rows.filter(side=self._sides[0])), self._options.top)
            self._tables["moved"] = [self._most_moved(pl.concat([*self._tables["moved"], moved], how="diagonal"))]

    def _most_moved(self, rows: pl.DataFrame) -> pl.DataFrame:
        return most_moved(rows, self._options.top).select(no_groups().columns)

    def table(self, name: str) -> pl.DataFrame:
        """See `Gatherer`; the rows of the groups that moved have their texts where these are asked for."""
        self._add_up()
        lines = super().table(name)
        return with_texts(self._run, lines) if name == "moved" and self._run is not None else lines

    def gathered(self) -> Gathered:
        """See `Gatherer`."""
        self._add_up()
        figures = {} if self._figure is None else {"": self._figure.data()}
        return replace(super().gathered(), advantages=figures)

    def take(self, gathered: Gathered) -> None:
        """See `Gatherer`."""
        super().take(gathered)
        self._run = None  # Each part has read its own texts.
        self._tables["moved"] = [self._most_moved(self.table("moved"))]
        if self._figure is not None:
            self._figure.take(gathered)

    @property
    def advantages(self) -> AdvantagesData | None:
        """The advantages, before and after; None where nobody asked for them."""
        return None if self._figure is None else self._figure.data()

    @property
    def input(self) -> InputSummary:
        """What was read."""
        sizes = self.table("seen")
        rows, groups, tokens = sizes.select(pl.sum("rows", "groups", "tokens")).row(0)
        return InputSummary(rows, len(sizes), groups, tokens)

    def notes(self) -> list[str]:
        """Return the steps that could not be evaluated, with the reason, and the groups that are one to the trainer."""
        failed = self.table("seen").drop_nulls("failure").group_by("failure").agg(pl.len(), pl.min("step"))
        failures = [
            f"{counted(count, 'step')} could not be evaluated, the first is step {first}: {why}"
            for why, count, first in failed.sort("failure").iter_rows()
        ]
        merged = [
            MergedCount(groups, (StepKey(step, split), names))
            for step, split, groups, names in self.table("merged").iter_rows()
        ]
        return failures + merged_notes(sum(merged, MergedCount()))

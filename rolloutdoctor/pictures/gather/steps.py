"""Figure accumulators: each gathers one picture step by step, as histograms and a table of a line a step or group."""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import polars as pl
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import STAND_INS
from rolloutdoctor.engine.gatherer import Gatherer, Schemas
from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, reward_kl_tokens
from rolloutdoctor.evaluation.row_changes import baseline_drift, is_change
from rolloutdoctor.evaluation.rows import in_scope
from rolloutdoctor.objective.objective import KlBuffer, Objective
from rolloutdoctor.objective.required_columns import (
    UNKNOWN_LOSS,
    advantage_columns,
    has_time_axis,
    loss_columns,
    optional_columns,
    reward_kl_columns,
)
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import (
    AdvantagesData,
    Band,
    BaselineData,
    GradientData,
    KlData,
    OverviewData,
    PictureData,
)
from rolloutdoctor.results.findings import NO_ROLLOUTS
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.metrics.kl_metric_corrupted import KlMetricCorrupted
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose, compared
from rolloutdoctor.trainers.spec import Trainer

POLICY_ONLY = "policy part"


LINES = "lines"
"""Table with a line a step."""

_SEEN = "seen"
"""Table with the steps that could be looked at."""


class FigureAccumulator(Gatherer):
    """Gathers one picture: a line of numbers a step, and histograms of the run.

    Attributes:
        fix: what the run is compared with, or None.
        unmoved: why the fix that the user named is not drawn; empty where it is.
        needs_objective: False: it is drawn of a run of any trainer.
        default_fix: what a picture that needs a comparison compares with, if the user says nothing.
        marking: codes of the rules whose findings are drawn in it.
        wanted: columns that it reads where they are there.
    """

    needs_objective: ClassVar[bool] = True
    default_fix: ClassVar[str | None] = None
    marking: ClassVar[tuple[str, ...]] = ()
    wanted: ClassVar[frozenset[str]] = frozenset()
    objectives: Mapping[str, Objective] = {}
    unmoved = ""

    def __init__(self, fix: str | None = None) -> None:
        super().__init__()
        self.fix = fix

    @classmethod
    def plan(cls, context: Context, fixes: Sequence[ChosenFix]) -> "FigureAccumulator":
        """Return what gathers the picture of a run, with and without some fixes.

        Raises:
            InputError: if it cannot be made of this run; the message says what would help.
            UsageError: if a fix that the user named is not about the trainer.
        """
        objective, fixed = context.objective, None
        if not cls.needs_objective:
            figure = cls()
        elif objective is None and not context.has_rows:
            raise InputError(f"{NO_ROLLOUTS}: {remedy(['*'], context)}")
        elif objective is None:
            raise InputError("the trainer of the run is unknown: name it with --trainer NAME")
        else:
            objective = compared(objective, fixes)
            label, fixed = _with_fixes(cls.default_fix, objective, fixes)
            figure = cls(label)
            figure.objectives = {AS_CONFIGURED: objective} | ({} if label is None or fixed is None else {label: fixed})
        figure.read(figure.prepare(context, frozenset() if fixed is None else advantage_columns(fixed)), context)
        return figure

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """Settle what is evaluated, and return the columns that this needs.

        Raises:
            InputError: if the picture cannot be made of this objective.
        """
        return loss_columns(self.objectives[AS_CONFIGURED]) | of_fix

    def read(self, needed: Collection[str], context: Context) -> None:
        """Read columns; refuse a run that lacks one that is needed.

        Raises:
            InputError: if it does; the message says what would record it.
        """
        absent = sorted(name for name in needed if not available(name, context.columns))
        if UNKNOWN_LOSS in absent and context.objective is not None:
            raise InputError(context.objective.unknown_loss)
        if absent:
            word = "column" if len(absent) == 1 else "columns"
            raise InputError(f"missing {word} {', '.join(absent)}: {remedy(absent, context)}")
        columns = {*needed, *self.wanted, *(optional_columns(context.objective) if context.objective else ())}
        stand_ins = (STAND_INS.get(name, ()) for name in columns)
        self.columns = context.columns.intersection(columns.union(*stand_ins))

    def add(self, step: EvaluatedStep) -> None:
        """Take in one step; a picture of what the trainer computes passes over one that it cannot."""
        if step.evaluations or not self.objectives:
            self.line(_SEEN, steps=step.batch.step)
            self.gather(step)

    @property
    def seen(self) -> bool:
        """True if some step could be looked at."""
        return not self.table(_SEEN).is_empty()

    @abstractmethod
    def gather(self, step: EvaluatedStep) -> None:
        """Take in one step; a step in which a column is null is passed over."""

    @abstractmethod
    def data(self) -> PictureData:
        """Return what has been gathered, in step order."""

    def series(self, *names: str) -> dict[str, Any]:
        """Return the steps in order, and some numbers of each; NaN where there is none."""
        empty = pl.DataFrame(schema={"steps": pl.Int64} | dict.fromkeys(names, pl.Float64))
        lines = pl.concat([empty, self.table(LINES)], how="diagonal_relaxed")
        return columns_of(lines.select(empty.columns))


def _with_fixes(
    default: str | None, objective: Objective, fixes: Sequence[ChosenFix]
) -> tuple[str | None, Objective | None]:
    """The label of what a picture compares with, and its objective; None if there is nothing to compare."""
    if fixes:
        for fix in fixes:
            objective = fix.apply(objective)
        return label_of(fixes), objective
    if default is None:
        return None, None
    fix = choose(default)
    return (fix.label, fix.apply(objective)) if fix.applies_to(objective) else (None, None)


def label_of(fixes: Sequence[ChosenFix]) -> str:
    """Return what several fixes are called together."""
    return " + ".join(fix.label for fix in fixes)


def columns_of(lines: pl.DataFrame) -> dict[str, Any]:
    """Return columns as tuples, in the order of their `steps`; NaN for null."""
    return {one.name: tuple(one) for one in lines.sort("steps").fill_null(math.nan)}


class OverviewFigure(FigureAccumulator):
    """What the trainer logged over the run; the report has it (`marks.marked`)."""

    needs_objective = False
    marking = tuple(rule.code for rule in RULES if isinstance(rule, NumbersRule))

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """Nothing is read."""
        return frozenset()

    def gather(self, step: EvaluatedStep) -> None:
        """Take in nothing."""

    def data(self) -> OverviewData:
        """Return a place for it."""
        return OverviewData()


class AdvantagesFigure(FigureAccumulator):
    """Histograms of the advantages of rows (tokens, with a time axis) that are trained on."""

    wanted = frozenset({"response_mask", "advantage", "advantages"})

    def __init__(self, fix: str | None) -> None:
        super().__init__(fix)
        self._data = AdvantagesData("rows", Histogram(), fix, None if fix is None else Histogram())

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        return advantage_columns(self.objectives[AS_CONFIGURED]) | of_fix

    def gather(self, step: EvaluatedStep) -> None:
        """Count one step."""
        before = _advantages(step, AS_CONFIGURED)
        after = None if self.fix is None else _advantages(step, self.fix)
        if before is None or (self.fix is not None and after is None):
            return
        rows, logged = step.evaluations[AS_CONFIGURED].rows, _logged_advantages(step)
        differ = 0 if logged is None else _differ(step, before, logged)
        unit = "tokens" if rows is None or rows.advantage_N is None else "rows"
        found, with_fix, flipped, changed = histogram(before), None, Histogram(), 0
        if after is not None:
            with_fix = histogram(after)
            moved = is_change((before - after).abs(), before, after)
            flipped, changed = histogram(before[moved & (before.sign() * after.sign() < 0)]), int(moved.sum())
        bands = (Band(step.batch.step, step.batch.step, found, with_fix, flipped.total),)
        of_log = None if logged is None else histogram(logged)
        self._data += AdvantagesData(unit, found, self.fix, with_fix, flipped, changed, bands, of_log, differ)

    def data(self) -> AdvantagesData:
        """Return the histograms."""
        return self._data

    def gathered(self) -> Gathered:
        """See `Gatherer`."""
        return replace(super().gathered(), advantages={"": self._data})

    def take(self, gathered: Gathered) -> None:
        """See `Gatherer`."""
        super().take(gathered)
        self._data += gathered.advantages.get("", self._data)


def _advantages(step: EvaluatedStep, name: str) -> Tensor | None:
    rows = step.evaluations[name].rows
    if rows is None:
        return None
    if rows.advantage_N is not None:
        return rows.advantage_N if rows.length_N is None else rows.advantage_N[rows.length_N > 0]
    assert rows.advantage_T is not None
    return rows.advantage_T[step.batch.column("response_mask")].double()


def _logged_advantages(step: EvaluatedStep) -> Tensor | None:
    """Return what the trainer logged for the same rows or tokens; None if it logged nothing, or not for all."""
    rows, batch = step.evaluations[AS_CONFIGURED].rows, step.batch
    if rows is None or rows.advantage_N is None:
        return batch.column("advantages")[batch.column("response_mask")].double() if batch.has("advantages") else None
    found = StepView(batch, step.logged).logged_advantages()
    return found if found is None or rows.length_N is None else found[rows.length_N > 0]


def _differ(step: EvaluatedStep, before: Tensor, logged: Tensor) -> int:
    """Count the rows whose logged advantage differs from the recomputed one by more than rounding."""
    rows = step.evaluations[AS_CONFIGURED].rows
    if rows is None or rows.advantage_N is None:
        return 0
    radius_N = StepView(step.batch, step.logged, evaluations=step.evaluations).advantage_radius()
    radius = radius_N if rows.length_N is None else radius_N[rows.length_N > 0]
    return int(((logged - before).abs() > radius).sum())


def carrying(batch: RolloutBatch, evaluation: Evaluation, term: str) -> Tensor:
    """Trained tokens that carry the policy term, or the KL term if the loss has one, ``[T]`` bool."""
    mask_T, objective = batch.column("response_mask"), evaluation.objective
    scope = objective.policy if term == "policy" else objective.kl
    if evaluation.rows is None or (term == "kl_loss" and objective.kl_loss is None):
        return mask_T
    return mask_T & seg.expand(in_scope(batch, evaluation.rows, scope), batch.rows)


_METRIC = "metric"
"""Table with the name of the metric of each step."""


class KlFigure(FigureAccumulator):
    """The KL metric as logged and recomputed, and the per-token KL."""

    wanted = frozenset({"kl"})
    trainer: Trainer | None = None

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective, self.trainer = self.objectives[AS_CONFIGURED], context.trainer
        if objective.kl_loss is not None:
            self.per_token = frozenset({AS_CONFIGURED})
            return loss_columns(objective)
        term = objective.kl_reward
        logged = context.metrics & set(context.trainer.log.kl if context.trainer else ())
        if term is None or (term.coef == 0 and not logged):
            raise InputError("the configuration has no KL term, so there is no KL to draw; set its options with --set")
        return reward_kl_columns(objective) | {"response_mask", "reward"}

    def gather(self, step: EvaluatedStep) -> None:
        """Take the metric, and count the tokens."""
        evaluation, batch, trainer = step.evaluations[AS_CONFIGURED], step.batch, self.trainer
        term = evaluation.objective.kl_loss
        kl_T = None
        if term is not None and evaluation.per_token is not None:
            kl_T = evaluation.per_token.kl_T
        elif term is None and evaluation.objective.kl_reward is not None:
            term = evaluation.objective.kl_reward
            kl_T = reward_kl_tokens(batch, evaluation.objective, step.dtype)
        if trainer is None or term is None or kl_T is None:
            return
        self.count("tokens", kl_T[carrying(batch, evaluation, "kl_loss")])
        if self.fix is not None:
            self.count("after", kl_T[carrying(batch, step.evaluations[self.fix], "kl_loss")])
        copied = replace(evaluation, objective=replace(evaluation.objective, kl_buffer=KlBuffer.COPY))
        recomputed = trainer.metrics(copied)
        known = [name for name in trainer.log.kl if name in recomputed]
        if not known:
            return
        name = next((name for name in known if name in step.logged), known[0])
        view = StepView(batch, step.logged, trainer, evaluations=step.evaluations, dtype=step.dtype)
        seen = KlMetricCorrupted().measure_step(view)
        fixed = None if self.fix is None else trainer.metrics(step.evaluations[self.fix]).get(name)
        logged, inverted = seen.get("logged", step.logged.get(name)), seen.get("inverted")
        self.line(LINES, steps=batch.step, logged=logged, recomputed=recomputed[name], inverted=inverted, after=fixed)
        self.line(_METRIC, name=name)

    def data(self) -> KlData:
        """Return the series."""
        names = ("logged", "recomputed", "inverted", *(() if self.fix is None else ("after",)))
        metrics, objective = self.table(_METRIC), self.objectives[AS_CONFIGURED]
        term = objective.kl_loss or objective.kl_reward
        return KlData(
            metric="" if metrics.is_empty() else metrics["name"][0],
            estimator="" if term is None else term.estimator,
            tokens=self.counts["tokens"],
            fix=self.fix,
            tokens_after=None if self.fix is None else self.counts["after"],
            **self.series(*names),
        )


class BaselineFigure(FigureAccumulator):
    """Drift of each group's baseline against its share of fully masked responses."""

    default_fix = "rejected-rows"
    fix: str
    schemas: ClassVar[Schemas] = {
        "groups": {
            "step": pl.Int64(),
            "touched": pl.Boolean(),
            "share": pl.Float64(),
            "drift": pl.Float64(),
            "moved": pl.Boolean(),
        },
    }

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective = self.objectives[AS_CONFIGURED]
        if has_time_axis(objective):
            raise InputError("the estimator has no group baseline")
        if len(self.objectives) == 1:
            raise InputError("no fix that changes a baseline applies to this run; choose one with --fix")
        return advantage_columns(objective) | of_fix | {"response_mask", "group_id"}

    def gather(self, step: EvaluatedStep) -> None:
        """Keep the groups of one step."""
        before, after = step.evaluations[AS_CONFIGURED].rows, step.evaluations[self.fix].rows
        groups = step.batch.groups
        if before is None or after is None or groups is None or before.rejected_N is None:
            return
        change = baseline_drift(before, after, ~before.rejected_N)
        if change is None:
            return
        drift_N, drifted_N = change
        columns = {"group": groups.index_N, "rejected": before.rejected_N, "drift": drift_N, "moved": drifted_N}
        rows = pl.DataFrame({name: x_N.cpu().numpy() for name, x_N in columns.items()})
        found = rows.group_by("group", maintain_order=True).agg(
            step=pl.lit(step.batch.step, pl.Int64),
            touched=pl.any("rejected"),
            # Rounded, so that the number of distinct shares is bounded whatever the sizes of the groups.
            share=(pl.mean("rejected") * 240).round() / 240,
            drift=pl.col("drift").filter(~pl.col("rejected")).mean(),
            moved=pl.any("moved"),
        )
        self.keep("groups", found.drop("group"))

    def data(self) -> BaselineData:
        """Return the points and their distribution."""
        groups = self.table("groups")
        touched = groups.filter("touched")
        known = touched.filter(pl.col("drift").is_finite())
        shares: dict[float, Histogram] = defaultdict(Histogram)
        for (_, share), own in known.group_by("step", "share"):
            shares[float(share)] += histogram(own["drift"].to_torch())
        points = [
            (share, index * one.width, count)
            for share, one in sorted(shares.items())
            for index, count in enumerate(one.counts, one.first)
            if count
        ]
        drifted = known.filter("moved")["drift"].abs().to_list()
        return BaselineData(
            self.fix,
            tuple(points),
            sum(shares.values(), Histogram()),
            untouched=len(groups) - len(touched),
            undefined=len(touched) - len(known),
            moved=len(drifted),
            largest=max(drifted, default=0.0),
        )


class GradientFigure(FigureAccumulator):
    """The parts of the gradient, and what the fix changes in it."""

    default_fix = "zero-std"

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        objective = self.objectives[AS_CONFIGURED]
        if objective.entropy_bonus is not None:
            raise InputError(objective.entropy_bonus.no_gradient)
        self.objectives = {**self.objectives, POLICY_ONLY: replace(objective, kl_loss=None)}
        return super().prepare(context, of_fix)

    def gather(self, step: EvaluatedStep) -> None:
        """Take the norms of one step."""
        whole, policy = step.evaluations[AS_CONFIGURED].tokens, step.evaluations[POLICY_ONLY].tokens
        if whole is None or policy is None:
            return
        l1, square = float(whole.grad_l1_N.sum()), float(whole.grad_sq_N.sum())
        spurious = cosine = None
        fixed = None if self.fix is None else step.evaluations[self.fix].tokens
        if fixed is not None:
            spurious = float(fixed.versus_l1_N.sum()) / l1 if l1 else None
            norms = (square * float(fixed.grad_sq_N.sum())) ** 0.5
            cosine = float(fixed.versus_dot_N.sum()) / norms if norms else None
        # Policy-only against the whole: what they differ by is the KL part.
        parts = {"policy": float(policy.grad_l1_N.sum()), "kl": float(policy.versus_l1_N.sum())}
        self.line(LINES, steps=step.batch.step, whole=l1, **parts, spurious=spurious, cosine=cosine)

    def data(self) -> GradientData:
        """Return the series."""
        return GradientData(self.fix, **self.series("whole", "policy", "kl", "spurious", "cosine"))

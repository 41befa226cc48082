"""Figure accumulators: each gathers one plot step by step, and keeps histograms and one number a step."""

from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, reward_kl_tokens
from rolloutdoctor.evaluation.row_changes import baseline_drift, is_change
from rolloutdoctor.evaluation.rows import in_scope
from rolloutdoctor.evaluation.token_measures import TokenMeasure
from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.results.figures import (
    MOST_BANDS,
    AdvantagesData,
    Band,
    BaselineData,
    GradientData,
    KlData,
    PictureData,
)
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.kl_metric_corrupted import KlMetricCorrupted
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.trainers.spec import Trainer

POLICY_ONLY = "policy part"


class FigureAccumulator(ABC):
    """Gathers one picture."""

    def token_measure(self, batch: RolloutBatch) -> TokenMeasure | None:
        """Return what is to be measured of a step's tokens, block by block, or None."""
        return None

    @abstractmethod
    def add(self, step: EvaluatedStep) -> None:
        """Take in one step; a step in which a column is null is passed over."""

    def add_all(self, steps: EvaluatedSteps) -> None:
        """Take in some steps."""
        for step in steps.steps:
            self.add(step)

    @abstractmethod
    def data(self) -> PictureData:
        """Return what has been gathered, in step order."""


@dataclass
class Bands:
    """Histograms of at most `MOST_BANDS` bands of steps; bands double in width when there would be more."""

    width: int = 1
    cells: dict[int, Band] = field(default_factory=dict)

    def add(self, band: Band) -> None:
        """Add one step."""
        self._put(band.first_step // self.width, band)
        self._widen()

    def merge(self, other: "Bands") -> None:
        """Add other steps; the order in which steps come makes no difference."""
        while self.width < other.width:
            self._double()
        for cell in other.cells.values():
            self._put(cell.first_step // self.width, cell)
        self._widen()

    def _widen(self) -> None:
        while len(self.cells) > MOST_BANDS:
            self._double()

    def _double(self) -> None:
        self.width *= 2
        before_cells, self.cells = self.cells, {}
        for index, cell in before_cells.items():
            self._put(index // 2, cell)

    def _put(self, index: int, cell: Band) -> None:
        seen = self.cells.get(index)
        if seen is not None:
            cell = Band(
                min(seen.first_step, cell.first_step),
                max(seen.last_step, cell.last_step),
                seen.before + cell.before,
                None if seen.after is None or cell.after is None else seen.after + cell.after,
                seen.flipped + cell.flipped,
            )
        self.cells[index] = cell

    def bands(self) -> tuple[Band, ...]:
        """The bands in step order."""
        return tuple(cell for _, cell in sorted(self.cells.items()))


class AdvantagesFigure(FigureAccumulator):
    """Histograms of the advantages of rows (tokens, with a time axis) that are trained on."""

    def __init__(self, fix: str | None) -> None:
        self.fix, self.unit = fix, "rows"
        self.before, self.after, self.flipped = Histogram(), Histogram(), Histogram()
        self.changed = 0
        self.logged: Histogram | None = None
        self.by_step = Bands()

    def add(self, step: EvaluatedStep) -> None:
        """Count one step."""
        before = self._values(step, AS_CONFIGURED)
        after = None if self.fix is None else self._values(step, self.fix)
        if before is None or (self.fix is not None and after is None):
            return
        found = histogram(before)
        self.before += found
        logged = self._logged(step)
        if logged is not None:
            self.logged = (self.logged or Histogram()) + histogram(logged)
        with_fix, flips = None, Histogram()
        if after is not None:
            with_fix = histogram(after)
            self.after += with_fix
            gap = (before - after).abs()
            moved = is_change(gap, before, after)
            self.changed += int(moved.sum())
            flips = histogram(before[moved & (before.sign() * after.sign() < 0)])
            self.flipped += flips
        self.by_step.add(Band(step.batch.step, step.batch.step, found, with_fix, flips.total))

    def __add__(self, other: "AdvantagesFigure") -> "AdvantagesFigure":
        """Return the figure of the steps of both."""
        total = deepcopy(self)
        total.merge(other)
        return total

    def merge(self, other: "AdvantagesFigure") -> None:
        """Add the steps of another one."""
        self.unit = "tokens" if "tokens" in (self.unit, other.unit) else self.unit
        self.before, self.after = self.before + other.before, self.after + other.after
        self.flipped += other.flipped
        self.changed += other.changed
        if other.logged is not None:
            self.logged = (self.logged or Histogram()) + other.logged
        self.by_step.merge(other.by_step)

    def _values(self, step: EvaluatedStep, name: str) -> Tensor | None:
        rows = step.evaluations[name].rows
        if rows is None:
            return None
        if rows.advantage_N is not None:
            return rows.advantage_N if rows.length_N is None else rows.advantage_N[rows.length_N > 0]
        self.unit = "tokens"
        assert rows.advantage_T is not None
        return rows.advantage_T[step.batch.column("response_mask")].double()

    def _logged(self, step: EvaluatedStep) -> Tensor | None:
        """What the trainer logged for the same rows or tokens; None if it logged nothing, or not for all of them."""
        rows, batch = step.evaluations[AS_CONFIGURED].rows, step.batch
        if self.unit == "tokens":
            return (
                batch.column("advantages")[batch.column("response_mask")].double() if batch.has("advantages") else None
            )
        found = StepView(batch, step.logged).logged_advantages()
        if found is None or rows is None:
            return None
        return found if rows.length_N is None else found[rows.length_N > 0]

    def data(self) -> AdvantagesData:
        """Return the histograms."""
        after = None if self.fix is None else self.after
        bands = self.by_step.bands()
        return AdvantagesData(self.unit, self.before, self.fix, after, self.flipped, self.changed, bands, self.logged)


@dataclass
class Series:
    """Named numbers, one of each a step."""

    rows: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)

    def add(self, step: int, *values: float | None) -> None:
        """Add one step."""
        self.rows.append((step, tuple(float("nan") if value is None else value for value in values)))

    def columns(self, count: int) -> tuple[tuple[int, ...], list[tuple[float, ...]]]:
        """Steps and columns in step order."""
        ordered = sorted(self.rows, key=lambda row: row[0])
        return tuple(step for step, _ in ordered), [tuple(values[n] for _, values in ordered) for n in range(count)]


def carrying(batch: RolloutBatch, evaluation: Evaluation, term: str) -> Tensor:
    """Trained tokens that carry the policy term, or the KL term if the loss has one, ``[T]`` bool."""
    mask_T, objective = batch.column("response_mask"), evaluation.objective
    scope = objective.policy if term == "policy" else objective.kl
    if evaluation.rows is None or (term == "kl_loss" and objective.kl_loss is None):
        return mask_T
    return mask_T & seg.expand(in_scope(batch, evaluation.rows, scope), batch.rows)


class KlFigure(FigureAccumulator):
    """The KL metric as logged and recomputed, and the per-token KL."""

    def __init__(self, trainer: Trainer | None, fix: str | None) -> None:
        self.trainer, self.fix, self.series = trainer, fix, Series()
        self.tokens = Histogram()
        self.tokens_after = None if fix is None else Histogram()
        self.metric, self.estimator = "", ""

    def add(self, step: EvaluatedStep) -> None:
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
        self.estimator = term.estimator
        self.tokens += histogram(kl_T[carrying(batch, evaluation, "kl_loss")])
        if self.fix is not None and self.tokens_after is not None:
            self.tokens_after += histogram(kl_T[carrying(batch, step.evaluations[self.fix], "kl_loss")])
        copied = replace(evaluation, objective=replace(evaluation.objective, kl_buffer=KlBuffer.COPY))
        recomputed = trainer.metrics(copied)
        known = [name for name in trainer.kl_metrics if name in recomputed]
        if not known:
            return
        name = next((name for name in known if name in step.logged), known[0])
        self.metric = self.metric or name
        view = StepView(batch, step.logged, trainer, evaluations=step.evaluations, dtype=step.dtype)
        seen = KlMetricCorrupted().measure_step(view)
        fixed = None if self.fix is None else trainer.metrics(step.evaluations[self.fix]).get(name)
        logged = seen.get("logged", step.logged.get(name))
        self.series.add(batch.step, logged, recomputed[name], seen.get("inverted"), fixed)

    def data(self) -> KlData:
        """Return the series."""
        steps, (logged, recomputed, inverted, after) = self.series.columns(4)
        return KlData(
            metric=self.metric,
            estimator=self.estimator,
            steps=steps,
            logged=logged,
            recomputed=recomputed,
            inverted=inverted,
            tokens=self.tokens,
            fix=self.fix,
            after=after if self.fix is not None else (),
            tokens_after=self.tokens_after,
        )


class BaselineFigure(FigureAccumulator):
    """Drift of each group's baseline against its share of fully masked responses."""

    def __init__(self, fix: str) -> None:
        self.fix = fix
        self.shares: dict[float, Histogram] = {}
        self.untouched = self.undefined = self.moved = 0
        self.largest = 0.0

    def add(self, step: EvaluatedStep) -> None:
        """Count the groups of one step."""
        before, after = step.evaluations[AS_CONFIGURED].rows, step.evaluations[self.fix].rows
        groups = step.batch.groups
        if before is None or after is None or groups is None or before.rejected_N is None:
            return
        live_N = ~before.rejected_N
        change = baseline_drift(before, after, live_N)
        if change is None:
            return
        drift_N, drifted_N = change
        rejected_G = groups.total(before.rejected_N)
        live_G = groups.total(live_N)
        drift_G = groups.total(torch.where(live_N, drift_N, 0.0)) / live_G
        touched_G = rejected_G > 0
        known_G = touched_G & drift_G.isfinite()
        self.untouched += int((~touched_G).sum())
        self.undefined += int((touched_G & ~known_G).sum())
        share_G = (rejected_G / groups.size_G)[known_G]
        drift = drift_G[known_G]
        moved = (groups.total(drifted_N) > 0)[known_G]
        self.moved += int(moved.sum())
        self.largest = max(self.largest, *drift[moved].abs().tolist()) if bool(moved.any()) else self.largest
        # Rounded, so that the number of distinct shares is bounded whatever the sizes of the groups.
        for share in sorted(set(share_G.mul(240).round().tolist())):
            here = histogram(drift[share_G.mul(240).round() == share])
            self.shares[share / 240] = self.shares.get(share / 240, Histogram()) + here

    def data(self) -> BaselineData:
        """Return the points and their distribution."""
        total = Histogram()
        points = []
        for share, one in sorted(self.shares.items()):
            total += one
            points += [(share, index * one.width, count) for index, count in enumerate(one.counts, one.first) if count]
        return BaselineData(self.fix, tuple(points), total, self.untouched, self.undefined, self.moved, self.largest)


class GradientFigure(FigureAccumulator):
    """The parts of the gradient, and what the fix changes in it."""

    def __init__(self, fix: str | None) -> None:
        self.fix, self.series = fix, Series()

    def add(self, step: EvaluatedStep) -> None:
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
        kl = float(policy.versus_l1_N.sum())
        self.series.add(step.batch.step, l1, float(policy.grad_l1_N.sum()), kl, spurious, cosine)

    def data(self) -> GradientData:
        """Return the series."""
        steps, (whole, policy, kl, spurious, cosine) = self.series.columns(5)
        return GradientData(self.fix, steps, whole, policy, kl, spurious, cosine)

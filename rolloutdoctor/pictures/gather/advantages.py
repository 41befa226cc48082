"""Gather the advantages of rows or tokens, with and without a fix."""

from dataclasses import replace

from torch import Tensor

from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.row_changes import is_change
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.pictures.gather.base import FigureAccumulator
from rolloutdoctor.results.figures import AdvantagesData, Band
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.step import StepView


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
        as_configured, with_fix, flipped, changed = histogram(before), None, Histogram(), 0
        if after is not None:
            with_fix = histogram(after)
            moved = is_change((before - after).abs(), before, after)
            flipped, changed = histogram(before[moved & (before.sign() * after.sign() < 0)]), int(moved.sum())
        bands = (Band(step.batch.step, step.batch.step, as_configured, with_fix, flipped.total),)
        of_log = None if logged is None else histogram(logged)
        self._data += AdvantagesData(unit, as_configured, self.fix, with_fix, flipped, changed, bands, of_log, differ)

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
    logged_N = StepView(batch, step.logged).logged_advantages()
    return logged_N if logged_N is None or rows.length_N is None else logged_N[rows.length_N > 0]


def _differ(step: EvaluatedStep, before: Tensor, logged: Tensor) -> int:
    """Count the rows whose logged advantage differs from the recomputed one by more than rounding."""
    rows = step.evaluations[AS_CONFIGURED].rows
    if rows is None or rows.advantage_N is None:
        return 0
    radius_N = StepView(step.batch, step.logged, evaluations=step.evaluations).advantage_radius()
    radius = radius_N if rows.length_N is None else radius_N[rows.length_N > 0]
    return int(((logged - before).abs() > radius).sum())

"""Gather the audit as a picture: logged against recomputed values, and their difference in rounding radii."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import polars as pl
import torch

from rolloutdoctor.audit.row_tally import ComparedRows
from rolloutdoctor.audit.tally import AuditTally, ComparedValue, add_tallies
from rolloutdoctor.audit.windows import OpenWindow
from rolloutdoctor.engine.accumulate import view_of, windows_at
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, advantage_columns, metric_columns
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.pictures.gather.steps import FigureAccumulator
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import AuditData, AuditedQuantity
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.identity_sides import related_metrics, relation_lines
from rolloutdoctor.search.hypotheses.fixes import ChosenFix
from rolloutdoctor.search.known_faults import code_of, known_faults

OF_STEP = 64
"""Values of a step and quantity that are kept as points."""

MOST_POINTS = 120
"""Points of a quantity that are drawn."""

_FAR = 1e9
"""Radii that a difference is cut off at."""

_POINTS = pl.List(pl.List(pl.Float64))

_LINES = pl.Schema(
    dict.fromkeys(("side", "stage", "quantity"), pl.String())
    | dict.fromkeys(("step", "compared", "agree", "not_compared"), pl.Int64())
    | {"worst": pl.Float64(), "points": _POINTS}
)


class AuditFigure(FigureAccumulator):
    """Logged values beside the recomputed ones, of every quantity that was logged."""

    context: Context

    def __init__(self, fix: str | None) -> None:
        super().__init__(fix)
        self._compared: list[tuple[object, ...]] = []
        self._windows: dict[tuple[str, str], OpenWindow] = {}
        self._faults: AuditTally = {}

    @classmethod
    def plan(cls, context: Context, fixes: Sequence[ChosenFix]) -> "FigureAccumulator":
        """See `FigureAccumulator`; a log alone is compared with itself."""
        return super().plan(context, fixes) if context.has_rows else LogAuditFigure.plan(context, ())

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        self.context, objective = context, self.objectives[AS_CONFIGURED]
        if not LOGGED_COLUMNS & context.columns and not context.metrics and not context.windows:
            raise InputError(f"nothing was logged that could be compared: {remedy(['metrics'], context)}")
        faults = known_faults(objective, context.columns)
        self._own = frozenset(self.objectives)
        self.objectives = {**{fix.label: fix.apply(objective) for fix in faults}, **self.objectives}
        self.optional = frozenset(self.objectives) - self._own
        wanted = LOGGED_COLUMNS | advantage_columns(objective) | metric_columns(objective) | {"response_mask"} | of_fix
        return frozenset(name for name in wanted if available(name, context.columns))

    def gather(self, step: EvaluatedStep) -> None:
        """Compare one step, under each objective."""
        told = view_of(step, self.context).audit
        self._faults = add_tallies(self._faults, {name: replace(tally, first=None) for name, tally in told.items()})
        for side in self._own:
            view = view_of(replace(step, evaluations={AS_CONFIGURED: step.evaluations[side]}), self.context)
            for quantity, one in view.compared_values().items():
                self._add(side, quantity, one)
            for key, window in windows_at(view, self.context).items():
                known = self._windows.get((side, key))
                self._windows[side, key] = window if known is None else known + window

    def _add(self, side: str, quantity: str, one: ComparedRows | ComparedValue) -> None:
        tally = one.tally()
        points = [] if side != AS_CONFIGURED else _of_value(one) if isinstance(one, ComparedValue) else _of_rows(one)
        counts = tally.compared, tally.agree, tally.not_compared, min(tally.worst, _FAR)
        self._compared.append((side, tally.stage, quantity, one.step, *counts, points))

    def data(self) -> AuditData:
        """Return every quantity, those that differ first."""
        for (side, _), window in self._windows.items():
            if len(window.steps) == window.size:
                self._add(side, window.name, window.compared())
        self._windows = {}
        lines = pl.DataFrame(self._compared, schema=_LINES, orient="row").sort("quantity", "step")
        of_fix = lines.filter(pl.col("side") != AS_CONFIGURED)
        found: dict[str, list[AuditedQuantity]] = {stage: [] for stage in STAGES}
        for (name, stage), own in lines.filter(side=AS_CONFIGURED).group_by("quantity", "stage", maintain_order=True):
            found[stage].append(_quantity(str(name), own, of_fix.filter(quantity=name) if self.fix else None))
        # One of each stage before the second of one.
        ordered = [self._with_fault(one) for several in zip_longest(*found.values()) for one in several if one]
        return AuditData(tuple(sorted(ordered, key=lambda one: (not one.differs, not one.fault))), self.fix)

    def _with_fault(self, one: AuditedQuantity) -> AuditedQuantity:
        """Name the fault of the release with which the values agree."""
        tally = self._faults.get(one.quantity)
        return replace(one, fault=code_of(tally.fault)) if tally is not None and tally.fault else one


class LogAuditFigure(FigureAccumulator):
    """Identities between the metrics of a log alone."""

    needs_objective = False
    context: Context

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`."""
        self.context = context
        if not related_metrics(context):
            raise InputError(
                "there are no rollouts to recompute the log from, and no identity is known between its metrics; "
                "`rolloutdoctor explain metrics TRAINER` lists them"
            )
        return frozenset()

    def gather(self, step: EvaluatedStep) -> None:
        """Keep what one step logged."""
        self._lines.append({"step": step.batch.step, **step.logged})

    def data(self) -> AuditData:
        """Return both sides of every identity, those that fail first."""
        names = sorted(related_metrics(self.context))
        schema = {"step": pl.Int64, **dict.fromkeys(names, pl.Float64)}
        wide = pl.DataFrame([{name: line.get(name) for name in schema} for line in self._lines], schema)
        lines = relation_lines(wide.with_columns(split=pl.lit("train")), self.context).select(
            "step",
            quantity="identity",
            compared=pl.lit(1),
            agree=(pl.col("beyond") <= 1).cast(pl.Int64),
            not_compared=pl.lit(0),
            worst="beyond",
            points=pl.concat_list(pl.concat_list("left", "right", "beyond")).reshape((-1, 1, 3)).cast(_POINTS),
        )
        found = [_quantity(str(name), own) for (name,), own in lines.group_by("quantity", maintain_order=True)]
        # A bound says less than an equality.
        found.sort(key=lambda one: (not one.differs, " = " not in one.quantity))
        return AuditData(tuple(found), of_log=True)


def _of_value(one: ComparedValue) -> list[list[float]]:
    tally = one.tally()
    return [[one.logged, one.recomputed, min(tally.worst, _FAR)]] if tally.compared else []


def _of_rows(one: ComparedRows) -> list[list[float]]:
    """Return some values of a step, evenly from the one that differs least to the one that differs most."""
    x_3n = torch.stack(one.points())
    order = x_3n[2].argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(OF_STEP, len(order))).round().long()
    x_3n[2].clamp_(max=_FAR)
    return [list(point) for point in x_3n[:, order[places]].T.tolist()]


def _quantity(name: str, lines: pl.DataFrame, of_fix: pl.DataFrame | None = None) -> AuditedQuantity:
    told = lines.filter(pl.col("compared") > 0)
    after: Mapping[int, float] = {}
    if of_fix is not None:
        after = dict(of_fix.filter(pl.col("compared") > 0).select("step", "worst").iter_rows())
    compared, agree, not_compared = (int(lines[count].sum()) for count in ("compared", "agree", "not_compared"))
    return AuditedQuantity(
        name,
        compared,
        agree,
        not_compared,
        steps=tuple(told["step"]),
        worst=tuple(told["worst"]),
        points=_chosen([(one[0], one[1], one[2]) for step in told["points"] for one in step]),
        after=() if of_fix is None else tuple(after.get(step, math.nan) for step in told["step"]),
        agree_after=0 if of_fix is None else int(of_fix["agree"].sum()),
    )


def _chosen(points: list[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Return some of the points that agree, and some of those that do not; the worst are among them."""
    found = []
    parts = [[one for one in points if (one[2] > 1) == off] for off in (False, True)]
    most = MOST_POINTS // max(1, sum(map(bool, parts)))
    for part in parts:
        part.sort(key=lambda one: one[2])
        count = min(most, len(part))
        found += [part[round(place * (len(part) - 1) / max(1, count - 1))] for place in range(count)]
    return tuple(found)

"""Gather the audit as a picture: logged against recomputed values, and their difference in rounding radii."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import ClassVar

import polars as pl
import torch

from rolloutdoctor.audit.row_tally import ComparedRows
from rolloutdoctor.audit.tally import ComparedValue
from rolloutdoctor.audit.windows import OpenWindow
from rolloutdoctor.engine.accumulate import view_of, windows_at
from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS, advantage_columns, metric_columns
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.pictures.gather.base import FigureAccumulator
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

_VALUES, _WINDOWS, _FAULTS = "values", "windows", "faults"

_OF_VALUES = (
    dict.fromkeys(("side", "stage", "quantity"), pl.String())
    | dict.fromkeys(("step", "compared", "agree", "not_compared"), pl.Int64())
    | {"worst": pl.Float64(), "points": _POINTS}
)

_WINDOW = ("name", "stage", "first", "last", "logged", "rounding", "size")
"""What the steps of a window have in common."""

_OF_WINDOWS = (
    dict.fromkeys(("side", "name", "stage", "doubt"), pl.String())
    | dict.fromkeys(("first", "last", "size", "step"), pl.Int64())
    | dict.fromkeys(("logged", "rounding", "value", "radius"), pl.Float64())
)

_OF_FAULTS = dict.fromkeys(("quantity", "label"), pl.String()) | dict.fromkeys(
    ("told", "as_is", "disagree"), pl.Int64()
)


class AuditFigure(FigureAccumulator):
    """Logged values beside the recomputed ones, of every quantity that was logged."""

    context: Context

    schemas: ClassVar[Schemas] = {_VALUES: _OF_VALUES, _WINDOWS: _OF_WINDOWS, _FAULTS: _OF_FAULTS}

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
        for quantity, tally in view_of(step, self.context).audit.items():
            for label, apart, as_is in tally.faults or (("", 0, 1),):
                counts = {"told": apart, "as_is": as_is, "disagree": tally.disagree}
                self.line(_FAULTS, quantity=quantity, label=label, **counts)
        for side in self._own:
            view = view_of(replace(step, evaluations={AS_CONFIGURED: step.evaluations[side]}), self.context)
            for quantity, comparison in view.compared_values().items():
                self.line(_VALUES, **_compared(side, quantity, comparison))
            for window in windows_at(view, self.context).values():
                common = {name: getattr(window, name) for name in _WINDOW}
                of_step = zip(window.steps, window.values, window.radii, strict=True)
                for at, value, radius in of_step:
                    self.line(_WINDOWS, side=side, **common, step=at, value=value, radius=radius, doubt=window.doubt)

    def data(self) -> AuditData:
        """Return every quantity, those that differ first."""
        means = [_compared(side, window.name, window.compared()) for side, window in _complete(self.table(_WINDOWS))]
        lines = pl.concat([self.table(_VALUES), pl.DataFrame(means, _OF_VALUES)]).sort("quantity", "step")
        of_fix = lines.filter(pl.col("side") != AS_CONFIGURED)
        by_stage: dict[str, list[AuditedQuantity]] = {stage: [] for stage in STAGES}
        for (name, stage), frame in lines.filter(side=AS_CONFIGURED).group_by("quantity", "stage", maintain_order=True):
            by_stage[stage].append(_quantity(str(name), frame, of_fix.filter(quantity=name) if self.fix else None))
        # One of each stage before the second of one.
        ordered = [self._with_fault(row) for several in zip_longest(*by_stage.values()) for row in several if row]
        return AuditData(tuple(sorted(ordered, key=lambda row: (not row.differs, not row.fault))), self.fix)

    def _with_fault(self, row: AuditedQuantity) -> AuditedQuantity:
        """Name the fault of the release with which the values agree."""
        lines = self.table(_FAULTS).filter(quantity=row.quantity)
        if lines["disagree"].sum():
            return row
        faults = lines.group_by("label").agg(pl.sum("told"), pl.sum("as_is")).filter(pl.col("told") == pl.col("as_is"))
        return row if faults.is_empty() else replace(row, fault=code_of(min(faults["label"])))


def _compared(side: str, quantity: str, comparison: ComparedRows | ComparedValue) -> dict[str, object]:
    """Return a line of the table of values: those of a step, or a mean over several."""
    tally = comparison.tally()
    points = (
        []
        if side != AS_CONFIGURED
        else _of_value(comparison)
        if isinstance(comparison, ComparedValue)
        else _of_rows(comparison)
    )
    return {
        "side": side,
        "stage": tally.stage,
        "quantity": quantity,
        "step": comparison.step,
        "compared": tally.compared,
        "agree": tally.agree,
        "not_compared": tally.not_compared,
        "worst": min(tally.worst, _FAR),
        "points": points,
    }


def _complete(windows: pl.DataFrame) -> Iterator[tuple[str, OpenWindow]]:
    """Yield the side and the window of every mean of which all steps were read."""
    steps = windows.sort("step").group_by("side", *_WINDOW, maintain_order=True)
    lines = steps.agg(
        steps="step", values="value", radii="radius", doubt=pl.col("doubt").filter(pl.col("doubt") != "").min()
    )
    for line in lines.filter(pl.col("steps").list.len() == pl.col("size")).iter_rows(named=True):
        window = {name: line[name] for name in _WINDOW}
        window |= {name: tuple(line[name]) for name in ("steps", "values", "radii")}
        yield line["side"], OpenWindow(**window, doubt=line["doubt"] or "")


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
        self.line("log", **{**step.logged, "step": step.batch.step})

    def data(self) -> AuditData:
        """Return both sides of every identity, those that fail first."""
        names = sorted(related_metrics(self.context))
        schema = {"step": pl.Int64(), **dict.fromkeys(names, pl.Float64())}
        wide = pl.concat([pl.DataFrame(schema=schema), self.table("log")], how="diagonal_relaxed").select(list(schema))
        lines = relation_lines(wide.with_columns(split=pl.lit("train")), self.context).select(
            "step",
            quantity="identity",
            compared=pl.lit(1),
            agree=(pl.col("beyond") <= 1).cast(pl.Int64),
            not_compared=pl.lit(0),
            worst="beyond",
            points=pl.concat_list(pl.concat_list("left", "right", "beyond")).reshape((-1, 1, 3)).cast(_POINTS),
        )
        quantities = [_quantity(str(name), frame) for (name,), frame in lines.group_by("quantity", maintain_order=True)]
        # A bound says less than an equality.
        quantities.sort(key=lambda row: (not row.differs, " = " not in row.quantity))
        return AuditData(tuple(quantities), of_log=True)


def _of_value(comparison: ComparedValue) -> list[list[float]]:
    tally = comparison.tally()
    return [[comparison.logged, comparison.recomputed, min(tally.worst, _FAR)]] if tally.compared else []


def _of_rows(comparison: ComparedRows) -> list[list[float]]:
    """Return some values of a step, evenly from the one that differs least to the one that differs most."""
    x_3n = torch.stack(comparison.points())
    order = x_3n[2].argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(OF_STEP, len(order))).round().long()
    x_3n[2].clamp_(max=_FAR)
    return [list(point) for point in x_3n[:, order[places]].T.tolist()]


def _quantity(name: str, lines: pl.DataFrame, of_fix: pl.DataFrame | None = None) -> AuditedQuantity:
    compared_steps = lines.filter(pl.col("compared") > 0)
    after: Mapping[int, float] = {}
    if of_fix is not None:
        after = dict(of_fix.filter(pl.col("compared") > 0).select("step", "worst").iter_rows())
    compared, agree, not_compared = (int(lines[count].sum()) for count in ("compared", "agree", "not_compared"))
    return AuditedQuantity(
        name,
        compared,
        agree,
        not_compared,
        steps=tuple(compared_steps["step"]),
        worst=tuple(compared_steps["worst"]),
        points=_chosen([(point[0], point[1], point[2]) for step in compared_steps["points"] for point in step]),
        after=() if of_fix is None else tuple(after.get(step, math.nan) for step in compared_steps["step"]),
        agree_after=0 if of_fix is None else int(of_fix["agree"].sum()),
    )


def _chosen(points: list[tuple[float, float, float]]) -> tuple[tuple[float, float, float], ...]:
    """Return some of the points that agree, and some of those that do not; the worst are among them."""
    chosen = []
    parts = [[point for point in points if (point[2] > 1) == off] for off in (False, True)]
    most = MOST_POINTS // max(1, sum(map(bool, parts)))
    for part in parts:
        part.sort(key=lambda point: point[2])
        count = min(most, len(part))
        chosen += [part[round(place * (len(part) - 1) / max(1, count - 1))] for place in range(count)]
    return tuple(chosen)

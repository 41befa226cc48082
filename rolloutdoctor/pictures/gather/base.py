"""Gather one picture step by step, as histograms and a table of a line a step or group: the base of all."""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import polars as pl
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import STAND_INS
from rolloutdoctor.engine.gatherer import Gatherer
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.evaluation.rows import in_scope
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import UNKNOWN_LOSS, advantage_columns, loss_columns, optional_columns
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.figures import PictureData
from rolloutdoctor.results.findings import NO_ROLLOUTS
from rolloutdoctor.rules.base import Context
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose, compared

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
    return {column.name: tuple(column) for column in lines.sort("steps").fill_null(math.nan)}


def carrying(batch: RolloutBatch, evaluation: Evaluation, term: str) -> Tensor:
    """Trained tokens that carry the policy term, or the KL term if the loss has one, ``[T]`` bool."""
    mask_T, objective = batch.column("response_mask"), evaluation.objective
    scope = objective.policy if term == "policy" else objective.kl
    if evaluation.rows is None or (term == "kl_loss" and objective.kl_loss is None):
        return mask_T
    return mask_T & seg.expand(in_scope(batch, evaluation.rows, scope), batch.rows)

"""Gather nothing for the overview: it is what the trainer logged."""

from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.pictures.gather.base import FigureAccumulator
from rolloutdoctor.results.figures import OverviewData
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES


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

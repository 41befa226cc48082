"""Every place that a rule points at, step after step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rolloutdoctor.commands.check import check, report_of
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.judge import seen_by
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps, run_file_steps
from rolloutdoctor.engine.serial import measure
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import Example, Report
from rolloutdoctor.rules.table import AnyRule
from rolloutdoctor.rules.table_rule import TableRule

PLACE_COLUMNS = ("step", "split", "group_id", "sample_id", "value", "note")


@dataclass(frozen=True)
class Place:
    """A row, a group or a step that a rule points at.

    Attributes:
        split: ``train`` or ``eval``.
        found: where, how large the effect is there, and what is to be seen.
    """

    split: str
    found: Example

    def cells(self) -> tuple[int, str, str | None, str | None, float, str]:
        """Return what `PLACE_COLUMNS` names."""
        found = self.found
        return found.step, self.split, found.group_id, found.sample_id, found.weight, found.note


class PlaceLister(RuleAccumulator):
    """Passes every place of each step on, the worst of a step first; nothing of it is kept."""

    def __init__(self, plan: Plan, rule: AnyRule, write: Callable[[Sequence[Place]], None]) -> None:
        super().__init__(plan)
        self._rule, self._write = rule, write

    def add_all(self, steps: EvaluatedSteps) -> None:
        """List the places of some steps, one after another."""
        for step in steps.steps:
            self._list(step)

    def _list(self, step: EvaluatedStep) -> None:
        batch, rule = step.batch, self._rule
        view = replace(self._view(step), lists_all=True)
        if batch.split not in rule.splits or not self._can_measure(rule, view):
            return
        rule.measure(view)
        places = sorted(rule.examples(view), key=lambda place: -place.weight)
        if places:
            self._write([Place(batch.split, place) for place in places])


def list_places(run: Run, rule: AnyRule, options: CheckOptions, write: Callable[[Sequence[Place]], None]) -> Report:
    """Check a run by one rule and, if it found something, list every place; the run is read once more for that.

    Args:
        run: what to read.
        rule: the rule.
        options: how to read it.
        write: takes the places of one step at a time.
    """
    options = replace(options, rules=[rule])
    if isinstance(rule, TableRule):
        return _list_lines(prepare(run, options), rule, write)
    report = check(run, options)
    if report.findings:
        prepared = prepare(run, options)
        lister = PlaceLister(prepared.plan, rule, write)
        run_file_steps(run, [lister], prepared.options, prepared.metrics)
    return report


def _list_lines(prepared: PreparedRun, rule: TableRule, write: Callable[[Sequence[Place]], None]) -> Report:
    """The same of a rule that queries tables."""
    state = measure(prepared)
    report = report_of(prepared, state)
    if report.findings:
        measured = seen_by(rule, state, prepared.context).total()
        places = [Place(split, found) for split, found in rule.listed(measured)]
        for _, of_step in groupby(places, key=lambda place: (place.found.step, place.split)):
            write(list(of_step))
    return report

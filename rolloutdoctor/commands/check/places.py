"""Every place that a rule points at, step after step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rolloutdoctor.engine.check import check_in_parts
from rolloutdoctor.engine.judge import measured_by
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import Example, Report
from rolloutdoctor.rules.table import AnyRule

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
        example = self.found
        return example.step, self.split, example.group_id, example.sample_id, example.weight, example.note


def list_places(run: Run, rule: AnyRule, options: CheckOptions, write: Callable[[Sequence[Place]], None]) -> Report:
    """Check a run by one rule and, if it found something, list every place.

    Args:
        run: what to read.
        rule: the rule.
        options: how to read it.
        write: takes the places of one step at a time.
    """
    checked = check_in_parts(run, replace(options, rules=[rule]))
    report = checked.report
    measured = measured_by(rule, checked.state, replace(checked.prepared.context, lists_places=True))
    if report.findings and measured is not None:
        places = [Place(split, example) for split, example in rule.listed(measured)]
        for _, of_step in groupby(places, key=lambda place: (place.found.step, place.split)):
            write(list(of_step))
    return report

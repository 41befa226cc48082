"""Two runs between which a number of a rule lies, and what becomes of either."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rules.checking import report_on

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES

NEAR = 0.03
"""How far the measured value may be from a number that is no count."""

Batches = RolloutBatch | Sequence[RolloutBatch]


@dataclass(frozen=True)
class RowBoundary:
    """Rows just below and just above one number of a rule.

    Attributes:
        code: of the rule.
        number: its attribute.
        below, above: the rows of either side.
        says: regular expressions of what becomes of them: ``clean``, ``skipped``, or severity and headline without
            digits.
        options: of `report_on`: trainer, logged metrics, options of the trainer.
        factor: by which the number is changed to see that it decides; of a count, the summand is 1.
    """

    code: str
    number: str
    below: Batches
    above: Batches
    says: tuple[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    factor: float = 1.1

    def outcomes(self) -> tuple[str, str]:
        """What becomes of the rows below and above."""
        options = {"trainer": None, **self.options}
        below, above = (report_on(rows, select=[self.code], **options) for rows in (self.below, self.above))
        return outcome(below), outcome(above)


def outcome(report: Report) -> str:
    """What the one rule of a report says, without digits."""
    if report.findings:
        found = report.findings[0]
        return f"{found.severity.label}: {re.sub('[0-9][0-9.e-]*', '#', found.headline)}"
    if report.clean:
        return "clean"
    return "not applicable" if report.not_applicable else "skipped"


def numbers_of_rules() -> set[tuple[str, str]]:
    """Code and name of every number of a rule that looks at rows; those of rules over logs are tested on logs."""
    return {
        (rule.code, each.name)
        for rule in RULES
        if not isinstance(rule, NumbersRule)
        for each in fields(rule)
        if isinstance(value := getattr(rule, each.name), int | float) and not isinstance(value, bool | Severity)
    }

"""Two runs between which a number of a rule lies, and what becomes of either."""

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from rules.checking import Metrics, report_on

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.findings import Report
from rolloutdoctor.rules import table
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES, AnyRule
from rolloutdoctor.testing import check_log

NEAR = 0.03
"""How far the measured value may be from a number that is no count."""

Batches = RolloutBatch | Sequence[RolloutBatch]

Log = Mapping[str, Any]
"""Series by quantity, as `check_log` takes them: of rules over rows that read a log without rows, too."""


@dataclass(frozen=True)
class RowBoundary:
    """Rows just below and just above one number of a rule.

    Attributes:
        code: of the rule.
        number: its attribute.
        below, above: the rows of either side, or the logs without rows.
        says: regular expressions of what becomes of them: ``clean``, ``skipped``, or severity and headline without
            digits.
        logged: metrics of the steps of either, as `report_on` takes them; `options` may have those of both.
        looks_at: text of the finding that `says` is about, and that a number may decide alone.
        options: of `report_on`: trainer, logged metrics, options of the trainer.
        factor: by which the number is changed to see that it decides; of a count, the summand is 1.
    """

    code: str
    number: str
    below: Batches | Log
    above: Batches | Log
    says: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    factor: float = 1.1
    looks_at: str = "headline"
    logged: tuple[Metrics | Sequence[Metrics], Metrics | Sequence[Metrics]] = ((), ())

    def outcomes(self) -> tuple[str, str]:
        """What becomes of the rows below and above."""
        sides = zip((self.below, self.above), self.logged, strict=True)
        below, above = (outcome(self._report(given, logged), self.looks_at) for given, logged in sides)
        return below, above

    def _report(self, given: Batches | Log, logged: Metrics | Sequence[Metrics]) -> Report:
        options = {"trainer": None, **self.options}
        if isinstance(given, Mapping):
            return check_log(self.code, options.pop("trainer"), **given, **options)
        return report_on(given, select=[self.code], **{"logged": logged, **options})


def near(
    code: str,
    name: str,
    number: float,
    made: Callable[[float], Batches | Log],
    *says: str,
    looks_at: str = "headline",
    **options: object,
) -> RowBoundary:
    """Rows a little below and above a number, which `made` takes."""
    below, above = made(number * (1 - NEAR)), made(number * (1 + NEAR))
    return RowBoundary(code, name, below, above, says, options, looks_at=looks_at)


def count(
    code: str, name: str, number: int, made: Callable[[int], Batches | Log], *says: str, **options: object
) -> RowBoundary:
    """Rows with one less of what is counted, and with so many."""
    return RowBoundary(code, name, made(number - 1), made(number), says, options)


def outcome(report: Report, looks_at: str = "headline") -> str:
    """What the one rule of a report says, without digits."""
    if report.findings:
        found = report.findings[0]
        return f"{found.severity.label}: {re.sub('[0-9][0-9.e-]*', '#', getattr(found, looks_at))}"
    if report.clean:
        return "clean"
    return "not applicable" if report.not_applicable else "skipped"


def numbers_of_rules() -> set[tuple[str, str]]:
    """Code and name of every number of a rule that looks at rows; those of rules over logs are tested on logs."""
    return {(rule.code, name) for rule in RULES if not isinstance(rule, NumbersRule) for name in numbers_of(rule)}


def numbers_of(rule: AnyRule) -> set[str]:
    """Names of the numbers that a rule, or one that it is a kind of, annotates as such."""
    kinds = [vars(kind).get("__annotations__", {}) for kind in type(rule).__mro__]
    return {name for kind in kinds for name, of in kind.items() if of in (int, float)}


def is_decided_by(boundary: Any, name: str, monkeypatch: Any) -> bool:
    """With a tenth more or less of a number, or one more or less of a count, both sides get the same answer."""
    rule = table.find(boundary.code)
    number = getattr(rule, name)
    others = (
        (number - 1, number + 1) if isinstance(number, int) else (number / boundary.factor, number * boundary.factor)
    )

    def are_alike(value: float) -> bool:
        changed = copy(rule)
        setattr(changed, name, value)
        with monkeypatch.context() as patched:
            patched.setattr(table, "RULES", tuple(changed if one is rule else one for one in table.RULES))
            below, above = boundary.outcomes()
        return below == above

    return any(map(are_alike, others))

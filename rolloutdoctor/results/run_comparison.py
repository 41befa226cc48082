"""Results of `compare`: two runs side by side, as plain data that every view renders."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.results.display import Displayed
from rolloutdoctor.results.findings import InputSummary, Measure, Setting

if TYPE_CHECKING:
    import polars as pl

_ROUNDING = 1e-9

Pair = tuple[float, float]
"""Values of run A and of run B; NaN where one is not known."""


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        name: what the user called it.
        input: how much was read.
        trainer: name of the trainer, or None if nothing says.
        trainer_version: its version, or None.
    """

    name: str
    input: InputSummary
    trainer: str | None = None
    trainer_version: str | None = None


@dataclass(frozen=True)
class OptionPair:
    """An option whose value differs; None: the run has no such option."""

    name: str
    a: Setting | None
    b: Setting | None


@dataclass(frozen=True)
class FindingPair:
    """Findings of a rule in both runs, where it fired in one of them at least.

    Attributes:
        code: of the rule.
        name: of the rule.
        a: its outcome in A: a severity, ``clean``, ``not applicable``, ``skipped``.
        b: its outcome in B.
        headline_a: the magnitude in A; empty where it did not fire.
        headline_b: the magnitude in B.
        measures: name of a measure to its values in A and in B, None where it did not fire.
    """

    code: str
    name: str
    a: str
    b: str
    headline_a: str
    headline_b: str
    measures: Mapping[str, tuple[Measure | None, Measure | None]]


@dataclass(frozen=True)
class Quantity:
    """A number of every step, as means over the steps that have it in both runs.

    Attributes:
        name: of the quantity or of the logged metric.
        origin: ``rows``, ``recomputed`` or ``logged``.
        split: ``train`` or ``eval``.
        unit: of the number.
        steps: the steps that have it in both runs, in order.
        values: those of each step.
        factor: a whole number of 2 or more that the value of one run is times that of the other in every step; 0: none.
        larger: the run with the larger ones, ``a`` or ``b``; empty without a factor.
    """

    name: str
    origin: str
    split: str
    unit: str
    steps: tuple[int, ...]
    values: tuple[Pair, ...]
    factor: int = 0
    larger: str = ""

    @property
    def mean(self) -> Pair:
        """Means of A and of B."""
        count = len(self.values)
        return (_total([a for a, _ in self.values]) / count, _total([b for _, b in self.values]) / count)

    @property
    def difference(self) -> float:
        """Mean of B less mean of A."""
        a, b = self.mean
        return b - a

    @property
    def equal(self) -> int:
        """Number of steps with the same value in both.

        What is computed here may differ by the rounding of a sum over rows in another order.
        """
        share = 0.0 if self.origin == "logged" else _ROUNDING
        return sum(abs(b - a) <= share * max(abs(a), abs(b)) for a, b in self.values)

    @property
    def widest(self) -> int:
        """Place of the step with the largest difference, the first of equals."""
        gaps = [abs(b - a) for a, b in self.values]
        return gaps.index(max(gaps))

    @property
    def widest_step(self) -> int:
        """That step."""
        return self.steps[self.widest]


def _total(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Matched:
    """A quantity of the rows that both runs have.

    Attributes:
        quantity: name of the column.
        compared: rows (steps, for the loss) in which it could be compared.
        equal: those in which it is the same, to the bit.
        largest: largest absolute difference of numbers; None for identifiers and masks.
        unit: ``row`` or ``step``.
    """

    quantity: str
    compared: int
    equal: int
    largest: float | None = None
    unit: str = "row"


@dataclass(frozen=True)
class FirstDifference:
    """The earliest step in which rows differ, and there the first quantity in causal order.

    Attributes:
        step: optimizer step.
        split: ``train`` or ``eval``.
        quantity: name of the column.
        sample_id: the first row that differs; None for a quantity of the whole step.
        token: the first token that differs, counted from 0; None for a value of the row.
        a: value in A; None: not a number.
        b: value in B.
        rows: rows of the step that differ in it.
        of: rows of the step that were compared.
    """

    step: int
    split: str
    quantity: str
    sample_id: str | None
    token: int | None
    a: float | None
    b: float | None
    rows: int
    of: int


@dataclass(frozen=True)
class Part:
    """One part of the rows of both runs.

    Attributes:
        name: of the part.
        values: name of a number to its values.
    """

    name: str
    values: Mapping[str, Pair]


@dataclass(frozen=True)
class RunComparison(Displayed):
    """Two runs side by side.

    Attributes:
        version: version of this package.
        device: where the evaluation ran.
        dtype: of the token values.
        a: the first run.
        b: the second run.
        steps: steps in both, in A alone, in B alone; each split counts on its own.
        options: options that differ.
        joined: rows with one step and sample_id in both.
        matched: quantities of these rows, in causal order.
        first: where the rows differ first; None: nowhere, or nothing could be compared.
        findings: rules that fired in one run at least, in the order of the table of rules.
        quantities: numbers of the steps, those of the rows first, then recomputed ones, then logged metrics.
        by: what the parts are parts by, or None.
        parts: the rows, broken down.
        notes: what could not be compared and why, one sentence each.
    """

    version: str
    device: str
    dtype: str
    a: Side
    b: Side
    steps: tuple[int, int, int]
    options: tuple[OptionPair, ...] = ()
    joined: int = 0
    matched: tuple[Matched, ...] = ()
    first: FirstDifference | None = None
    findings: tuple[FindingPair, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    by: str | None = None
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Summarise the comparison in a line."""
        words = (
            "equal" if not self.differs else f"first difference at step {self.first.step}" if self.first else "differ"
        )
        return f"<RunComparison {self.a.name} and {self.b.name}: {words}; {self.steps[0]:,} steps in both>"

    @property
    def differs(self) -> bool:
        """True if anything that was compared is not the same."""
        return (
            self.first is not None
            or bool(self.options or self.steps[1] or self.steps[2])
            or any(pair.a != pair.b for pair in self.findings)
            or any(quantity.equal < len(quantity.values) for quantity in self.quantities)
        )

    def frame(self) -> "pl.DataFrame":
        """One row for each quantity and step as a polars frame."""
        import polars as pl

        lines = [
            (quantity.name, quantity.origin, quantity.split, step, a, b, b - a)
            for quantity in self.quantities
            for step, (a, b) in zip(quantity.steps, quantity.values, strict=True)
        ]
        names = ("quantity", "origin", "split", "step", "a", "b", "difference")
        types = (pl.String, pl.String, pl.String, pl.Int64, pl.Float64, pl.Float64, pl.Float64)
        return pl.DataFrame(lines, schema=dict(zip(names, types, strict=True)), orient="row")

"""A rule that queries the tables of a run: its columns, one query, its measures as expressions, a judgement."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.ops.tally import Sums
from rolloutdoctor.results.findings import Example, Measure
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import StepKey
    from rolloutdoctor.rules.step import StepView

Quantity = tuple[pl.Expr, str]
"""An expression over the lines of a rule's table, and its unit."""


@dataclass(frozen=True)
class Nothing(Sums):
    """No tally."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What a rule measured of a run.

    Attributes:
        table: its own table.
        values: name of a measure to its value over the whole run; None where it is not defined.
        run: the tables of the run, as the rule sees them.
    """

    table: pl.DataFrame
    values: Mapping[str, float | int | None]
    run: RunTables

    def __getitem__(self, name: str) -> float | int | None:
        return self.values[name]

    def count(self, name: str) -> int:
        """A measure that is always defined, such as a number of rows."""
        return int(self.values[name] or 0)


@dataclass(frozen=True)
class TableRule(Rule[Any]):
    """A rule that is a query over `rows` and `metrics`.

    Attributes:
        reads: columns of `rows` that the query reads beside those that name a row; `rewards` is every ``rewards/NAME``.
        adds: columns that `measure_tokens` and `measure_rows` add to these; what else `measure_tokens` returns is for
            `measure_rows` alone.
        optional: measures that are left out where they are not defined.
    """

    tally = Nothing
    reads: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    def metrics(self, context: Context) -> frozenset[str]:
        """Return the logged metrics that the query reads."""
        return frozenset()

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return further values of rows, ``[N]`` each, None where the step has none.

        `table` has them as columns of `rows`, as it has those of `measure_tokens`.
        """
        return {}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Return further values of a step whose rows were measured; `table` has them as `metrics` of these names."""
        return {}

    @abstractmethod
    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return the lines that the rule counts, each with its `step` and `split`: groups, rows, prompts, steps."""

    @abstractmethod
    def quantities(self) -> Mapping[str, Quantity]:
        """Return the measures over `table`: of the run, and of each step for the series."""

    def places(self, table: pl.DataFrame) -> pl.DataFrame | None:
        """Return the lines to look at, with their size in column `value`; None: the rule is about all rows."""
        return None

    def note(self, place: Mapping[str, Any]) -> str:
        """Say what is to be seen at a place, in a few words.

        Args:
            place: a line of `places`.
        """
        return ""

    def measured(self, run: RunTables, context: Context) -> Measured:
        """Query a run."""
        table = self.table(run, context)
        return Measured(table, _values(table.select(**self._expressions())), run)

    def series(self, measured: Measured, steps: Sequence["StepKey"]) -> list[dict[str, Any]]:
        """Return the measures of some steps, each by itself.

        Args:
            measured: the run.
            steps: which steps.
        """
        expressions = self._expressions()
        nothing = _values(measured.table.clear().select(**expressions))
        found = measured.table.group_by(STEP_KEY).agg(**expressions).to_dicts()
        known = {(line.pop("step"), line.pop("split")): _finite(line) for line in found}
        lines = [(step, split, known.get((step, split), nothing)) for step, split in steps]
        return [{"step": step, "split": split, **self._defined(line)} for step, split, line in lines]

    def measures(self, tally: Measured | Nothing) -> Mapping[str, Measure]:
        """Return the numbers that users see; of nothing, their names and units."""
        units = {name: unit for name, (_, unit) in self.quantities().items()}
        values = self._defined(tally.values) if isinstance(tally, Measured) else dict.fromkeys(units)
        return {name: Measure(value, units[name]) for name, value in values.items()}

    def _defined(self, values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
        return {name: value for name, value in values.items() if value is not None or name not in self.optional}

    def worst(self, measured: Measured) -> Sequence[Example]:
        """Return the worst places of the run, worst first."""
        return [self._example(place) for place in self._sorted(measured).head(KEEP_EXAMPLES).iter_rows(named=True)]

    def listed(self, measured: Measured) -> Iterator[tuple[str, Example]]:
        """Yield the split and place of every place of the run, step after step, the worst of a step first."""
        found = self._sorted(measured).sort(STEP_KEY, maintain_order=True)
        for place in found.iter_rows(named=True):
            yield place["split"], self._example(place)

    def _sorted(self, measured: Measured) -> pl.DataFrame:
        places = self.places(measured.table)
        if places is None:
            return measured.table.clear()
        # Of places of equal size the first of a step.
        names = [name for name in ("row", "group", "group_id", "sample_id") if name in places.columns]
        places = places.with_columns(pl.col("value").cast(pl.Float64))
        # For polars NaN is above every number.
        return places.filter(pl.col("value") > 0, pl.col("value").is_not_nan()).sort(
            ["value", "step", *names], descending=[True] + [False] * (1 + len(names)), nulls_last=True
        )

    def _example(self, place: Mapping[str, Any]) -> Example:
        names = place.get("group_id"), place.get("sample_id")
        return Example(place["step"], *names, place["value"], self.note(place))

    def _expressions(self) -> dict[str, pl.Expr]:
        return {name: expression for name, (expression, _) in self.quantities().items()}


def scores(context: Context) -> pl.Expr:
    """Return the reward that the estimator sees: sums of token rewards, less any KL penalty in them."""
    sums = context.objective is not None and context.objective.advantage.sums_tokens
    return pl.col("score" if sums else "reward")


def _values(frame: pl.DataFrame) -> dict[str, float | int | None]:
    """The values of a frame of one line."""
    return _finite(frame.to_dicts()[0])


def _finite(values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """Return values with None for those that are not finite: a share of nothing is not defined."""
    return {name: None if value is None or not isfinite(value) else value for name, value in values.items()}

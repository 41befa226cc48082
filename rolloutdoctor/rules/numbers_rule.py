"""What rules over the trainer's log have in common: they name quantities, not metrics."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import LONGER_LOG
from rolloutdoctor.rules.base import Context, Judgement, Missing, number
from rolloutdoctor.rules.logged_quantities import by_step, metrics_of, not_logged
from rolloutdoctor.rules.series import Ends, ends
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


class NumbersRule(TableRule):
    """A rule over logged quantities, whatever the trainer calls them; its table has one line a logged step.

    Attributes:
        about: quantities without which there is nothing to judge, names in `metric_names.quantities`.
        beside: quantities that it reads where they are logged.
        fewest: logged steps that it takes.
    """

    needs_objective = False
    needs_rows = False
    splits = ("train",)
    about: ClassVar[tuple[str, ...]] = ()
    beside: ClassVar[tuple[str, ...]] = ()

    fewest: int = 10

    def __init_subclass__(cls) -> None:
        """Leave out what is not logged."""
        super().__init_subclass__()
        cls.optional = (*cls.optional, *cls.beside)

    def columns(self, context: Context) -> frozenset[str]:
        """None: it is all in the log."""
        return frozenset()

    def metrics(self, context: Context) -> frozenset[str]:
        """The trainer's names of the quantities."""
        return metrics_of(context, (*self.about, *self.beside))

    def watched(self, context: Context) -> tuple[str, ...]:
        """What the rule is about."""
        return self.about or self.beside

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without the quantity."""
        return None if context.quantities.keys() >= {*self.about} else not_logged(context, *self.about)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step that logged all that the rule is about; further quantities are null where absent."""
        wide = by_step(run, context, (*self.about, *self.beside))
        wanted = pl.all_horizontal if self.about else pl.any_horizontal
        is_there = [pl.col(name).is_finite().fill_null(value=False) for name in self.about or self.beside]
        return wide.filter(wanted(is_there)).sort("step")

    def quantities(self) -> Mapping[str, Quantity]:
        """The mean of each."""
        return {name: (pl.col(name).mean(), BY_NAME[name].unit) for name in (*self.about, *self.beside)}

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps of the largest values of what the rule is about."""
        return table.with_columns(value=(*self.about, *self.beside)[0])

    def note(self, place: Mapping[str, Any]) -> str:
        """What the step logged."""
        return ", ".join(shown(place, name) for name in self.about or self.beside if place[name] is not None)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps, of which nothing can be said."""
        if len(run.table) >= self.fewest or self.judge_few(run, context) is not None:
            return None
        title = BY_NAME[(*self.about, *self.beside)[0]].title
        return Missing(f"needs {self.fewest} steps with a logged {title}; the log has {len(run.table)}", LONGER_LOG)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Judge a log of enough steps, or what fewer prove."""
        return (self.judge_log if len(run.table) >= self.fewest else self.judge_few)(run, context)

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge fewer lines than the rule takes; None if they prove nothing."""
        return None

    @abstractmethod
    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Judge the lines of the table; None if there is nothing to find."""


def series(run: Measured, name: str) -> "Values":
    """Return a quantity of the table, NaN where it was not logged."""
    return run.table[name].cast(pl.Float64).fill_null(float("nan")).to_numpy()


def where_logged(run: Measured, name: str) -> Measured:
    """Return the lines with a quantity."""
    return replace(run, table=run.table.filter(pl.col(name).is_finite()))


def logged(run: Measured, name: str) -> "Values | None":
    """Return the numbers of a quantity that half of the steps or more logged, or `ENOUGH` of them; None if fewer did.

    A trainer that updates several times for one generation logs the rewards of the first of these updates.
    """
    import numpy as np

    values = series(run, name)
    finite = values[np.isfinite(values)]
    return finite if len(finite) >= min(ENOUGH, max(3, len(values) / 2)) else None


ENOUGH = 6
"""Values of which the first three and the last three tell a change."""


def levels(run: Measured, name: str) -> Ends | None:
    """Return from where to where such a quantity went; None if it was not logged."""
    values = logged(run, name)
    return None if values is None else ends(values)


def step_at(run: Measured, place: int) -> int:
    """Return the step of a line of the table."""
    return int(run.table["step"][place])


def go_back(run: Measured, step: int) -> str:
    """Say from where to start again: a checkpoint, if there can be one before the step."""
    earlier = step > step_at(run, 0)
    return f"go back to a checkpoint before step {step}" if earlier else "start again from the initial model"


def from_to(first: float, last: float) -> str:
    """Say from where to where a number went.

    >>> from_to(2.39, 0.0004)
    'from 2.39 to 0.0004'
    """
    return f"from {number(first)} to {number(last)}"


def at_most(values: "Values", last: float) -> str:
    """Say how large a number was at most, where that is far above where it went.

    >>> import numpy as np
    >>> at_most(np.array([0.1, 70.0, 2.0]), 2.0), at_most(np.array([0.1, 3.0, 2.0]), 2.0)
    (' (70 at most)', '')
    """
    largest = float(values.max())
    return f" ({number(largest)} at most)" if largest > _FAR_ABOVE * last else ""


_FAR_ABOVE = 3.0
"""Times the level at the end: above it that level alone does not say how large a number was."""


def shown(place: Mapping[str, Any], name: str) -> str:
    """Say what a step logged of a quantity."""
    return f"{BY_NAME[name].title} {number(place[name])}"

"""Reward functions of a log whose mean is one number, or exactly 0, for `constant-reward`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.metric_names.table import functions
from rolloutdoctor.rules.base import Context, number
from rolloutdoctor.rules.logged_quantities import may_round

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SOLVED = 1.0
"""What most functions give for a success."""

CHANCE = 1e-6
"""Of a run, that a value which some steps had holds to its end."""


@dataclass(frozen=True)
class Constant:
    """A reward function whose mean is one number to the end of the log.

    Attributes:
        name: of the function.
        value: the number.
        since: step from which on.
        steps: logged steps since then.
        whole: it is so from the first logged step on.
        proved: the standard deviation over the responses is logged as 0 throughout.
        solved: the value is that of a success, or above what the function gave before: nothing is broken.
    """

    name: str
    value: float
    since: int
    steps: int
    whole: bool
    proved: bool
    solved: bool

    @property
    def words(self) -> str:
        """What it gives, and since when."""
        when = f"in all {self.steps:,} logged steps" if self.whole else f"from step {self.since} on"
        return f"{self.name} is constant at {number(self.value)} {when}"


def functions_of(context: Context) -> Mapping[str, tuple[str, str | None]]:
    """Return the functions that the log alone can show, with the metrics of their means and deviations."""
    return {} if "rewards" in context.columns else functions(context.metrics)


def zero_functions(
    table: pl.DataFrame, context: Context, coarse: float, coarse_spread: float
) -> tuple[list[str], bool]:
    """Return the functions that gave 0 throughout, and whether their deviations prove that of every response.

    Not a penalty that nothing incurred, nor those of options that give one no weight.

    Args:
        table: some lines of the log.
        context: what is logged.
        coarse: unit of the last digit from which on a mean may have been rounded to 0.
        coarse_spread: the same of a deviation.
    """
    zero = [
        (name, spread)
        for name, (metric, spread) in functions_of(context).items()
        if len(table) and (table[metric] == 0).all() and not may_round(context, metric, coarse)
        if not _is_spared(name, context) and (spread is None or (table[spread] == 0).fill_null(value=False).all())
    ]
    proved = [name for name, spread in zero if spread and not may_round(context, spread, coarse_spread)]
    # Rewards of both signs may have a mean of 0 once, and hardly twice.
    return proved or [name for name, _ in zero if len(table) > 1], bool(proved)


def constant_functions(table: pl.DataFrame, context: Context, fewest: int, coarse_spread: float) -> Iterator[Constant]:
    """Yield the functions whose mean is one number to the end of a log, for so many steps and half of it.

    Not by chance: a value that earlier steps had now and then may hold for some steps.

    Args:
        table: the lines of the log.
        context: what is logged.
        fewest: such steps.
        coarse_spread: unit of the last digit from which on a deviation may have been rounded to 0.
    """
    import numpy as np

    for name, (metric, spread) in functions_of(context).items():
        finite = table.drop_nulls(metric).filter(pl.col(metric).is_finite())
        values = finite[metric].to_numpy()
        if len(values) < fewest:
            continue
        before = values[: len(values) - int(np.argmin(np.append(values[::-1] == values[-1], False)))]
        held, value = len(values) - len(before), float(values[-1])
        if held < max(fewest, len(values) / 2) or _is_chance(before == value, held):
            continue
        stds = None if spread is None else finite[spread][len(before) :].fill_null(float("nan")).to_numpy()
        if stds is not None and np.nanmax(stds, initial=0.0) > 0:
            continue
        passes = (
            value > 0 or (value == 0 and _is_spared(name, context))
            if not len(before)
            else value > float(np.median(before))
        )
        yield Constant(
            name=name,
            value=value,
            since=int(finite["step"][len(before)]),
            steps=held,
            whole=not len(before),
            proved=stds is not None and not np.isnan(stds).any() and not may_round(context, str(spread), coarse_spread),
            solved=passes or value == SOLVED,
        )


def _is_chance(same: "NDArray[np.bool_]", held: int) -> bool:
    """Tell whether a value that earlier steps had now and then may hold so long: of a success that is rare."""
    share = (int(same.sum()) + 1) / (len(same) + 1) if len(same) else 0.0
    return float(share**held) > CHANCE


def _is_spared(name: str, context: Context) -> bool:
    """Tell whether 0 throughout may be right: of a penalty, or where a function has no weight."""
    return any(word in name.lower() for word in ("penalt", "punish")) or _has_weight_of_zero(context)


def _has_weight_of_zero(context: Context) -> bool:
    """Tell whether the options give a reward function no weight; which one, no log says."""
    setting = None if context.config is None else context.config.settings.get("reward_weights")
    return setting is not None and isinstance(setting.value, list | tuple) and 0 in setting.value

"""Columns of canonical quantities: what a run logged, whatever its trainer calls it."""

from collections.abc import Collection
from itertools import chain

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.name import MetricName
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import names_of
from rolloutdoctor.metric_names.training_kind import DISTILLATION, NEEDS_NO_REWARD
from rolloutdoctor.rules.base import Context, Missing, logs_remedy


def metrics_of(context: Context, names: Collection[str]) -> frozenset[str]:
    """Return the columns that hold some quantities."""
    logged = context.quantities
    return frozenset(context.column_of(logged[name][0]) for name in names if name in logged)


def by_step(run: RunTables, context: Context, names: Collection[str]) -> pl.DataFrame:
    """Return one line a step with a column for each of some quantities, null where the step did not log it."""
    logged = context.quantities
    columns = {name: context.column_of(logged[name][0]) for name in names if name in logged}
    wide = run.by_step(*{*columns.values()})
    values = {
        name: _canonical(columns[name], logged[name][1]) if name in columns else pl.lit(None, pl.Float64)
        for name in names
    }
    return wide.select("step", "split", **values)


def not_logged(context: Context, *names: str) -> Missing:
    """Say which quantities a log does not have, and what to log to test the rule.

    Args:
        context: what is known of the run.
        names: quantities that the rule needs; those that the log has are not named.
    """
    absent = [name for name in names if name not in context.quantities]
    titles = [BY_NAME[name].title for name in absent]
    reason = f"the log has no metric for the {' and the '.join(titles)}"
    if not context.likely_writers or not context.metrics | context.averaged:
        return Missing(reason, context.recording.get("metrics", logs_remedy()))
    writer = context.likely_writers[0]
    advised = [names_of(writer, name)[:1] for name in absent]
    if all(advised):
        return Missing(reason, f"log {' and '.join(chain(*advised))}, as {writer} does")
    missing = " and ".join(title for title, metrics in zip(titles, advised, strict=True) if not metrics)
    return Missing(reason, f"record the rollouts: {writer} does not log the {missing}")


def is_reward_free(context: Context) -> pl.Expr:
    """Tell whether no group of a step had a spread of rewards; null where the log does not say.

    True where the share of zero-variance groups is 1, or all advantages are 0, or the standard deviation of the rewards
    is exactly 0; False where the share is less (and counts all such groups), or an advantage is not 0.
    """
    share, low, high = pl.col("zero_variance_share"), pl.col("advantage_min"), pl.col("advantage_max")
    is_free = (share == 1).fill_null(value=False) | ((low == 0) & (high == 0)).fill_null(value=False)
    if not is_rounded(context, "reward_std"):
        is_free |= (pl.col("reward_std") == 0).fill_null(value=False)
    quantity = context.quantities.get("zero_variance_share")
    is_spread = ((low != 0) | (high != 0)).fill_null(value=False)
    if quantity is not None and not quantity[1].lower_bound:
        is_spread |= (share < 1).fill_null(value=False)
    return pl.when(is_free).then(True).when(is_spread).then(False)  # polars has no names for these


def of_distillation(context: Context) -> str | None:
    """Say that a distillation learns from a teacher, and needs no reward; None of any other training."""
    return NEEDS_NO_REWARD if context.training_kind == DISTILLATION else None


NO_SUCH_METRIC = "the log has no such metric"
"""A trainer logs tool calls, turns and rewards less a KL penalty where the run has them."""

SPREAD = ("zero_variance_share", "advantage_min", "advantage_max", "reward_std")
"""Quantities that tell whether rewards differ within groups."""


def tells_spread(context: Context) -> bool:
    """Tell whether a log says of a step that no group had a spread of rewards."""
    names = context.quantities
    return "zero_variance_share" in names or "reward_std" in names or {"advantage_min", "advantage_max"} <= names.keys()


def is_rounded(context: Context, name: str, coarse: float = 0.0) -> bool:
    """Tell whether a logged 0 of a quantity may be a number above `coarse` that the log rounded."""
    quantity = context.quantities.get(name)
    return quantity is not None and may_round(context, quantity[0], coarse)


def may_round(context: Context, metric: str, coarse: float = 0.0) -> bool:
    """Tell the same of a metric."""
    if metric not in context.digits:
        return False
    # A log is printed in one way: what all metrics may have been rounded to says more than one that is 0 throughout.
    common = set.intersection(*map(set, context.digits.values()))
    return any(form.radius(0.0) > coarse for form in common or context.digits[metric])


def _canonical(logged: str, metric: MetricName) -> pl.Expr:
    """Return a metric as its quantity; null throughout if the trainer logs 0 because it computed nothing."""
    value = metric.factor * pl.col(logged) + metric.offset
    return pl.when((pl.col(logged) != 0).any()).then(value) if metric.zero_when_off else value

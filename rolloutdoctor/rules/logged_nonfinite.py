"""NaN and infinity in the metrics of a trainer's log; part of RDM003."""

from collections.abc import Sequence
from itertools import chain

import polars as pl

from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, counted, number
from rolloutdoctor.rules.logged_gaps import OF_FUNCTIONS
from rolloutdoctor.rules.logged_oddities import HIDDEN, REACHES_WEIGHTS, Oddity

_KL_ALONE = (
    "The logged loss is finite, so no term with this KL reached the weights: it is a metric alone, or the mean over no "
    "tokens."
)
_NAMED = 2
"""Metrics of the same steps that are named; of more only the first is."""


def nonfinite_columns(metrics: pl.DataFrame) -> tuple[pl.DataFrame, list[pl.Expr]]:
    """Return the metrics with their last finite value, and what to aggregate of them by step.

    Args:
        metrics: step, split, metric, logged and quantity; sorted by step.

    Returns:
        The frame, and expressions for the names of metrics that are not finite (`bad`), of those that are NaN
        (`bad_nan`), and for the last finite value of each of `bad` before the step (`before`, null if there is none).
    """
    logged, metric = pl.col("logged"), pl.col("metric")
    is_bad = ~logged.is_finite()
    last_finite = pl.when(~is_bad).then(logged).forward_fill().over("split", "metric")
    columns = [
        metric.filter(is_bad).sort().alias("bad"),
        metric.filter(is_bad & logged.is_nan()).sort().alias("bad_nan"),
        pl.col("last_finite").sort_by(metric).filter(is_bad.sort_by(metric)).alias("before"),
    ]
    return metrics.with_columns(last_finite=last_finite), columns


def judge_nonfinite(table: pl.DataFrame, context: Context) -> Oddity | None:
    """Say which metrics are NaN or infinite, and in which steps.

    Args:
        table: one line a step, with `is_finite` and the columns of `nonfinite_columns`.
        context: what is known of the run.
    """
    bad = table.filter(~pl.col("is_finite"))
    if not len(bad):
        return None
    quantity = metric_quantities(context.metrics)
    order = [name for name in BY_NAME if name in {*quantity.values()}]
    names = sorted(
        set(chain.from_iterable(bad["bad"])),
        key=lambda name: (
            quantity.get(name) not in REACHES_WEIGHTS,
            quantity.get(name) in OF_FUNCTIONS,
            order.index(quantity[name]) if name in quantity else len(order),
            name,
        ),
    )
    steps = {name: bad.filter(pl.col("bad").list.contains(name))["step"].to_list() for name in names}
    first = names[0]
    same = [name for name in names if steps[name] == steps[first]]
    rest = [name for name in names if name not in same]
    words = _clause(same, bad, table)
    if rest:
        words += f"; {_clause([rest[0]], bad, table)}" + (f" ({len(rest) - 1:,} more)" if len(rest) > 1 else "")
    quantities = {quantity[name] for name in names if name in quantity}
    # Of functions that score some rows, and of what nobody knows, a NaN may be the mean of nothing.
    reaches, partial = quantity.get(first) in REACHES_WEIGHTS, quantity.get(first) in {*OF_FUNCTIONS, None}
    onset = steps[first][0]
    return Oddity(
        severity=Severity.ERROR if reaches else Severity.INFO if partial else Severity.WARNING,
        words=words,
        advice=f"inspect the batch of step {onset} for empty masks, log(0) and overflows",
        why="" if reaches else _KL_ALONE if quantities == {"kl"} else HIDDEN,
        onset=onset,
    )


def _clause(names: Sequence[str], bad: pl.DataFrame, table: pl.DataFrame) -> str:
    """Say of metrics that are not finite in the same steps what they are, where, and what they were before."""
    frame = bad.filter(pl.col("bad").list.contains(names[0]))
    is_nan = [frame["bad_nan"].list.contains(name) for name in names]
    all_nan, any_nan = all(flags.all() for flags in is_nan), any(flags.any() for flags in is_nan)
    kind = "NaN" if all_nan else "NaN or infinite" if any_nan else "infinite"
    listed = " and ".join(names) if len(names) <= _NAMED else f"{names[0]} and {len(names) - 1:,} more metrics"
    first, count = frame["step"][0], len(frame)
    before = [_before(frame, name) for name in names[:_NAMED]] if len(names) <= _NAMED else []
    were = "" if not before or None in before else f" ({' and '.join(map(number, before))} before)"
    if count == len(table) == 1:
        where = f"in step {first}, the only logged step"
    elif count == len(table):
        where = f"in all {count:,} logged steps"
    elif count == 1:
        where = f"in step {first}"
    elif count == table.filter(pl.col("step") >= first).height:
        where = f"from step {first} on"
    else:
        where = f"in {count:,} of {counted(len(table), 'step')}, first in step {first}"
    return f"{listed} {'is' if len(names) == 1 else 'are'} {kind} {where}{were}"


def _before(frame: pl.DataFrame, name: str) -> float | None:
    """Return the last finite value of a metric before the first step in which it is none."""
    before: dict[str, float | None] = dict(zip(frame["bad"][0], frame["before"][0], strict=True))
    return before[name]

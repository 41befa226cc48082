"""A logged loss that is 0 from some step to the end, of a training that stopped."""

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, counted, number, own_name
from rolloutdoctor.rules.logged_oddities import Oddity
from rolloutdoctor.rules.logged_quantities import is_rounded, tells_spread
from rolloutdoctor.rules.table_rule import Measured

STOPPED = ("loss", "reward", "accuracy")
"""Quantities by which a training that stopped is told, beside the gradient norm and the KL."""


def stopped(run: Measured, context: Context, *, fewest: int) -> Oddity | None:
    """A loss of 0 in the last half of the lines or more, where the accuracy or the reward stays what it is.

    A loss of 0 alone proves nothing: on-policy, centred advantages cancel. So a gradient norm above 0 or a KL that
    moves excuses it, and what stays has to have changed from line to line before.
    """
    table = run.table.sort("step")
    lines = table.drop_nulls("loss")
    moving = lines.filter(pl.col("loss") != 0)["step"]
    # Where the log tells of groups without a spread of rewards, these are why.
    if not len(moving) or tells_spread(context):
        return None
    end = lines.filter(pl.col("step") > moving[-1])
    if len(end) < max(fewest, len(lines) / 2):
        return None
    first = int(end["step"][0])
    if (end["grad_norm"].drop_nulls() != 0).any() or end["kl"].drop_nulls().n_unique() > 1:
        return None
    stays = [name for name in ("accuracy", "reward") if _stays(table, name, first, len(end))]
    if not stays:
        return None
    value = number(float(table[stays[0]].drop_nulls()[-1]))
    exactly = "0 to the last digit that is logged" if is_rounded(context, "loss") else "exactly 0"
    return Oddity(
        severity=Severity.WARNING,
        confirmed=False,
        words=f"training stopped at step {first}: the loss is {exactly} from there on, in "
        f"{len(end):,} of {counted(len(lines), 'line')}, and the {stays[0]} stays {value}",
        advice=f"look at the responses before step {first}: a policy that gives one answer with probability 1 has no "
        "gradient; go back to an earlier checkpoint, and lower "
        f"{own_name(context, 'the learning rate')}",
        why="Where the loss and its gradient are 0 the weights stay as they are, whatever the run goes on to sample.",
        onset=first,
    )


def _stays(table: pl.DataFrame, name: str, first: int, lines: int) -> bool:
    """Tell whether a quantity has one value from a step on, in so many lines, and none twice in a row before."""
    known = table.drop_nulls(name)
    before, after = (known.filter(is_part)[name] for is_part in (pl.col("step") < first, pl.col("step") >= first))
    return (
        len(before) > 1
        and bool((before.diff().drop_nulls() != 0).all())
        and (len(after) >= lines and after.n_unique() == 1)
    )

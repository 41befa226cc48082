"""A logged loss of 0: to the end, of a training that stopped, or wherever all rewards of a line are equal."""

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, counted, number, own_name
from rolloutdoctor.rules.logged_oddities import Oddity
from rolloutdoctor.rules.logged_quantities import is_rounded, tells_spread
from rolloutdoctor.rules.table_rule import Measured

STOPPED = ("loss", "reward", "accuracy")
"""Quantities by which a training that stopped is told, beside the gradient norm and the KL."""

MANY, FEW, DISTINCT = 0.4, 3, 0.01
"""Share of the lines that is told, lines of either kind that it takes, and a loss beside which 0 is no rounded one."""


def zero_losses(run: Measured, context: Context, *, fewest: int) -> Oddity | None:
    """Lines that repeat; a loss of 0 to the end, or where rewards are equal, unless the log tells their spread."""
    if (frozen := _frozen(run, fewest=fewest)) is not None or tells_spread(context):
        return frozen
    return _stopped(run, context, fewest=fewest) or _equal_rewards(run, fewest=fewest)


_FROZEN, OF_FROZEN = 3, ("loss", "reward", "kl", "grad_norm", "accuracy")
"""Quantities but 0 that keep their values together, and those that are looked at: no two batches give equal ones."""


def _frozen(run: Measured, *, fewest: int) -> Oddity | None:
    """Several quantities that keep their values in the last half of the lines or more, and changed in each before."""
    table = run.table.sort("step")
    names = [name for name in OF_FROZEN if table[name].null_count() < len(table)]
    moving = [table.filter(pl.col(name) != pl.col(name).last())["step"].max() for name in names]
    if not names or not (since := [step for step in moving if isinstance(step, int)]):
        return None
    end = table.filter(pl.col("step") > max(since))
    if len(end) < max(fewest, len(table) / 2):
        return None
    first = int(end["step"][0])
    frozen = [name for name in names if end[name][-1] and _stays(table, name, first, len(end))]
    if len(frozen) < _FROZEN:
        return None
    return Oddity(
        severity=Severity.WARNING,
        confirmed=False,
        words=f"the log repeats from step {first} on: {', '.join(frozen[:-1])} and {frozen[-1]} keep their values in "
        f"{len(end):,} of {counted(len(table), 'line')}",
        advice=f"look at what is logged from step {first} on: a loop that trains no more, or one that logs old numbers",
        why="Each batch has responses of its own, and so other numbers.",
        onset=first,
    )


def _equal_rewards(run: Measured, *, fewest: int) -> Oddity | None:
    """A loss of exactly 0 in many lines, and far from it in the others: there the lines have no advantage.

    On-policy, centred advantages cancel, but then in every line. The mean of rewards between 0 and 1 is 0 or 1 only if
    each of them is: a loss beside it has another term.
    """
    lines = run.table.drop_nulls(["loss", "reward"])
    equal = pl.col("reward").is_in([0.0, 1.0]) & pl.lit(lines["reward"].is_between(0, 1).all())
    zero, others = lines.filter(pl.col("loss") == 0), lines.filter(pl.col("loss") != 0)
    is_clear = (others["loss"].abs() > DISTINCT).all() and not len(others.filter(equal))
    has_gradient = (zero["grad_norm"].drop_nulls() != 0).any()
    if len(lines) < fewest or not is_clear or has_gradient or min(len(zero), len(others)) < FEW:
        return None
    # Before a policy is trained, as while a critic warms up, its loss is 0.
    if len(zero) < MANY * len(lines) or zero["step"].to_numpy().max() < others["step"].to_numpy().min():
        return None
    alike = len(zero.filter(equal))
    words = f"in {len(zero):,} of {counted(len(lines), 'line')} "
    if alike == len(zero):
        words += (
            "every response has the same reward (the mean is exactly 0 or 1, and the loss is 0): they train nothing"
        )
    else:
        least = number(float(others["loss"].abs().to_numpy().min()))
        words += f"the loss is exactly 0, and {least} or more in the others: they train nothing, as where the rewards "
        words += f"of a group are equal{f' (in {alike:,} every reward is 0 or 1)' if alike else ''}"
    return Oddity(
        severity=Severity.INFO,
        confirmed=False,
        words=words,
        remark=words,
        hinders=True,
        advice="use prompts that are neither solved nor too hard, sample more responses to a prompt, or drop "
        "zero-variance groups",
        why="A group whose rewards are all equal has advantages of 0.",
    )


def _stopped(run: Measured, context: Context, *, fewest: int) -> Oddity | None:
    """A loss of 0 in the last half of the lines or more, where the accuracy or the reward stays what it is.

    A loss of 0 alone proves nothing: on-policy, centred advantages cancel. So a gradient norm above 0 or a KL that
    moves excuses it, and what stays has to have changed from line to line before.
    """
    table = run.table.sort("step")
    lines = table.drop_nulls("loss")
    moving = lines.filter(pl.col("loss") != 0)["step"]
    if not len(moving):
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
    present = table.drop_nulls(name)
    before, after = (present.filter(is_part)[name] for is_part in (pl.col("step") < first, pl.col("step") >= first))
    return (
        len(before) > 1
        and bool((before.diff().drop_nulls() != 0).all())
        and (len(after) >= lines and after.n_unique() == 1)
    )

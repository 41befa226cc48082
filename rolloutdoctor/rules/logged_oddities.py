"""Ways in which the numbers of a log are odd: none at all, impossible, or out of all proportion."""

from dataclasses import dataclass

import polars as pl

from rolloutdoctor.io.reader_notes import NULL
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.metric_names.value_bounds import BOUNDS, MEAN_RATIOS, SLACK
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, counted, number
from rolloutdoctor.rules.table_rule import Measured

REACHES_WEIGHTS = frozenset({"loss", "policy_loss", "grad_norm", "critic_loss", "critic_grad_norm"})
"""Quantities that reach the weights where they are NaN."""

_LEVELS = REACHES_WEIGHTS | {"reward", "reward_std", "kl", "kl_term", "entropy", "response_length", "learning_rate"}
"""Quantities that a trainer logs in every step or in none."""

HIDDEN = "A metric that is not a number hides what it would show."
"""Why a metric without a value matters."""


@dataclass(frozen=True)
class Oddity:
    """One way in which logged numbers are odd.

    Attributes:
        severity: how much it matters.
        words: what stands out, and where.
        advice: what to do.
        why: why it matters; empty: as the page says.
        confirmed: the log proves it.
        onset: first step, where there is one.
        remark: what belongs beside "no fault was found".
        hinders: it may be why the reward does not rise.
    """

    severity: Severity
    words: str
    advice: str
    why: str
    confirmed: bool = True
    onset: int | None = None
    remark: str = ""
    hinders: bool = False


def is_impossible(context: Context) -> pl.Expr:
    """Tell lines (`metric`, `logged`) with a value that its quantity cannot have, beyond rounding."""
    logged, beyond = pl.col("logged"), pl.lit(value=False)
    for name, (low, high) in BOUNDS.items():
        if name not in context.quantities:
            continue
        metric, meaning = context.quantities[name]
        scaled = meaning.factor * logged + meaning.offset
        is_out = scaled.is_finite() & ~scaled.is_between(low - SLACK, high + SLACK)
        beyond |= (pl.col("metric") == metric) & is_out
    return beyond


def ended(run: Measured, context: Context) -> Oddity | None:
    """A quantity that was logged, and is not any more, though others are."""
    ends = [gap for gaps in context.gaps.values() for gap in gaps if gap.ended]
    if not ends:
        return None
    ends.sort(key=lambda gap: gap.quantity not in _LEVELS)
    gap = ends[0]
    more = f", and so {'is' if len(ends) == 2 else 'are'} {counted(len(ends) - 1, 'more metric')}" if ends[1:] else ""
    return Oddity(
        severity=Severity.WARNING if gap.quantity in _LEVELS else Severity.INFO,
        words=f"{gap.words}{more}",
        advice=f"find out why it ends at step {gap.first}: trainers that drop a NaN log nothing, or None",
        why=HIDDEN,
        onset=gap.first,
    )


def without_value(run: Measured, context: Context) -> Oddity | None:
    """A quantity that every line names, and none has."""
    nulls = [name for name, cell in context.unread.items() if cell == NULL]
    quantities = metric_quantities(nulls)
    names = sorted(name for name, quantity in quantities.items() if quantity in _LEVELS)
    if not names:
        return None
    words = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {NULL}"
    return Oddity(
        severity=Severity.INFO,
        words=words,
        advice="find out why it has no value, unless it is switched off: some trainers log None for NaN",
        why=HIDDEN,
        remark=words,
    )


def impossible(run: Measured, context: Context) -> Oddity | None:
    """A value beyond what its quantity can be."""
    odd = run.table.filter(pl.col("beyond").is_not_null())
    if not len(odd):
        return None
    metric, value, step = odd.select("beyond", "beyond_value", "step").row(0)
    title = BY_NAME[metric_quantities(context.metrics)[metric]].title
    if title == BY_NAME["response_kl"].title:
        lowest = float(odd.filter(pl.col("beyond") == metric)["beyond_value"].to_numpy().min())
        return Oddity(
            severity=Severity.WARNING,
            words=f"{metric} falls to {number(lowest)} nats: the responses were not sampled from the policy that "
            "scores them",
            advice="sample from the whole distribution (no top-k, top-p or least length, temperature 1), and score the "
            "same tokens with the same padding, and without dropout",
            why="Of its own samples the sum of a policy's log-ratio is below -x in one of exp(x) responses at most.",
            onset=step,
        )
    if value > 1 and title in (BY_NAME[name].title for name in MEAN_RATIOS):
        return Oddity(
            severity=Severity.WARNING,
            words=f"{metric} is {number(value)} in step {step}: the mean {title} of a policy's own samples is 1",
            advice="score the sampled tokens with the policy that sampled them, at its temperature and shifted alike; "
            "clip or normalise ratios of whole responses",
            why="Of its own samples the mean ratio of a policy is above x in one of x logs at most.",
            onset=step,
        )
    is_other_sign = len(odd) == len(run.table) and title == "entropy"
    cannot = "below 0" if value < 0 else "above 1"
    return Oddity(
        severity=Severity.INFO if is_other_sign else Severity.WARNING,
        words=f"{metric} is {number(value)} in step {step}: the {title} cannot be {cannot}",
        advice=f"check what {metric} is computed from, and its sign",
        why="A metric beyond the values of its quantity is not what its name says.",
        onset=step,
    )


def huge(run: Measured, context: Context, *, norm_above: float) -> Oddity | None:
    """A gradient norm that no averaged loss gives."""
    huge = run.table.filter(pl.col("grad_norm") > norm_above)
    if not len(huge):
        return None
    return Oddity(
        severity=Severity.WARNING,
        confirmed=False,
        words=f"a gradient norm of {number(run['grad_norm_max'])} in {counted(len(huge), 'step')}",
        advice="check the scale of the loss, the weights as they were loaded, and the precision of gradients",
        why="Clipping divides such a gradient by its norm, so that what is left is mostly what overflowed or was "
        "scaled wrongly.",
    )

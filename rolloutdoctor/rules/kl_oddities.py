"""A logged KL that its estimator cannot give, or that stands out."""

import math

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, counted, number, own_name
from rolloutdoctor.rules.logged_oddities import Oddity
from rolloutdoctor.rules.series import chance_limit, is_passing
from rolloutdoctor.rules.table_rule import Measured

_NEVER_NEGATIVE = frozenset({"k2", "k3", "k3_clamped", "abs"})
"""Estimators of which no value is negative."""


def negative(run: Measured, context: Context, *, below: float, fewest_negative: int) -> Oddity | None:
    """A negative mean of an estimator that is never negative."""
    steps, objective = run.count("negative_kl_steps"), context.objective
    term = None if objective is None else objective.kl_loss
    if not steps or (objective is not None and (term is None or term.estimator not in _NEVER_NEGATIVE)):
        return None
    if term is not None and _may_be_another(context):
        term = None  # an estimator that was only assumed contradicts nothing
    if term is None and steps < fewest_negative and (run["lowest_kl"] or 0.0) >= -below:
        return None
    lowest = number(run["lowest_kl"])
    words = (
        f"the logged KL is negative in {counted(steps, 'step')}, down to {lowest}: it is k1, the mean log-ratio, "
        "since k2 and k3 are never negative"
    )
    if term is not None:
        words = f"a negative KL of {lowest} ({counted(steps, 'step')}) from an estimator that is never negative"
    return Oddity(
        severity=Severity.INFO if term is None else Severity.WARNING,
        words=words,
        advice="check what the KL metric is computed from"
        + ("; k1 may be near 0 where policies differ" if term is None else ": it is not the configured estimator"),
        why="An estimator that is never negative cannot give this value, so the metric is computed from another.",
        # Of a policy's own samples the mean of k1 is at least 0: now and then below, not most of the time.
        remark=words if 2 * steps > len(run.table["kl"].drop_nulls()) else "",
        onset=run.table.filter("is_wrong")["step"][0],
    )


def improbable(run: Measured, context: Context, *, chance: float) -> Oddity | None:
    """A KL of responses, the mean of their sums of k1, that a policy's own samples give in few of so many updates.

    Of samples of p the mean of q/p is 1 at most, and exp is convex: a mean of log(p/q) below -x, over however many
    responses, has a probability of exp(-x) at most.
    """
    kl = run.table["response_kl"].drop_nulls()
    lowest = min(0.0, float(kl.to_numpy().min())) if len(kl) else 0.0
    if not len(kl) or len(kl) * math.exp(lowest) >= chance:
        return None
    name = context.quantities["response_kl"][0]
    step = run.table.filter(pl.col("response_kl") == lowest)["step"][0]
    words = (
        f"{name} is {number(lowest)} nats in step {step}: at most one update in {math.exp(-lowest):,.0f} would be so "
        "low if the policy that scores the responses had sampled them"
    )
    return Oddity(
        severity=Severity.INFO,
        words=words,
        remark=words,
        hinders=True,
        advice="sample from the whole distribution (no top-k, top-p or least length, temperature 1), and score the "
        "same tokens with the same padding, and without dropout",
        why="A KL far below 0 says that other tokens or another distribution were scored than sampled.",
        onset=step,
    )


MOST_KL = 100.0
"""Nats: the mean of k3 is an exponential of one token's log-ratio then, and no tail of other steps explains it."""


def _recurring(run: Measured, context: Context, *, fewest: int) -> Oddity | None:
    """A KL above `MOST_KL` in many lines of a log whose usual KL is far below: no batch is to blame for all of them.

    A log whose usual KL is large as well may sum the KL over a response; one whose KL stays large is `RDT004`'s.
    """
    values = run.table.drop_nulls("kl").sort("step")
    beyond = values.filter(pl.col("kl") > MOST_KL)
    ends = values, values.tail(max(3, len(values) // 10))
    usual = max(part.select(pl.median("kl").fill_null(0.0)).item() for part in ends)
    if len(beyond) < fewest or usual > MOST_KL / 10:
        return None
    top = beyond.sort("kl", descending=True, maintain_order=True).row(0, named=True)
    first = int(beyond["step"][0])
    return Oddity(
        severity=Severity.WARNING,
        words=f"the KL is above {MOST_KL:g} nats in {len(beyond):,} of {counted(len(values), 'step')}, from step "
        f"{first} on, and {number(top['kl'])} nats in step {top['step']}",
        advice=f"lower {own_name(context, 'the learning rate')} or clip gradients harder, and check that the reference "
        "scores the same tokens as the policy",
        why="Such a policy samples tokens that are all but impossible to the reference, and a KL term in the loss "
        "outweighs the reward.",
        onset=first,
    )


def spike(run: Measured, context: Context, *, fewest: int, peak_above: float, small_kl: float) -> Oddity | None:
    """A KL that stands out, in one line or in many."""
    if (many := _recurring(run, context, fewest=fewest)) is not None:
        return many
    kl = run.table["kl"].drop_nulls()
    if len(kl) <= fewest or (run["kl_peak"] or 0) <= peak_above:
        return None
    values = kl.to_numpy()
    limit = peak_above * float(values.sum() - values.max()) / (len(values) - 1)
    if values.max() <= min(chance_limit(values, limit), MOST_KL):
        return None
    is_small = (run["kl_max"] or 0) < small_kl or is_passing(values, values > limit, is_state=True)
    step = run.table.drop_nulls("kl")["step"][int(values.argmax())]
    words = f"a KL spike of {number(run['kl_max'])}, {number(run['kl_peak'])} times the mean of the other steps"
    return Oddity(
        severity=Severity.INFO if is_small else Severity.WARNING,
        confirmed=False,
        words=words,
        remark=words if values.max() > MOST_KL else "",
        hinders=bool(values.max() > MOST_KL),
        advice=f"inspect the batch of step {step}; if spikes recur, lower {own_name(context, 'the learning rate')}",
        why="At such a step the policy suddenly differs far more from the reference than around it.",
    )


def _may_be_another(context: Context) -> bool:
    """Tell whether an option that nothing states could make the KL one that may be negative."""
    from rolloutdoctor.trainers.deciding_options import alternatives

    if context.trainer is None or context.config is None or "kl" not in context.deciding:
        return False
    others = alternatives(context.trainer, context.config, context.deciding["kl"].assumed)
    terms = (objective.kl_loss or objective.kl_reward for objective in others)
    return any(term is not None and term.estimator not in _NEVER_NEGATIVE for term in terms)

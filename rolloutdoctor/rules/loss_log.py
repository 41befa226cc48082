"""Losses of about zero in a trainer's log, without rollouts; part of RDG002."""

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Judgement, counted, logged_lines, number

DIGITS, DIGIT = 4, 1e-4
"""The transformers library rounds the loss that it logs to four digits."""

FEWEST_LINES, FEWEST_STILL = 10, 3
"""Logged lines that a verdict takes, and steps with reward variance and without a gradient."""


def judge_log(log: pl.DataFrame, near_zero: float) -> Judgement | None:
    """Judge the losses of a log without rollouts.

    Args:
        log: a line a step with the `logged` loss and `norm` of the gradient; `no_norm` where that is 0 and no rounding
            of the log made it so, `free` of reward variance in any group, `all_cut` where no response was finished.
        near_zero: a loss below it is about zero.
    """
    loss, count = pl.col("logged"), len(log)
    if not count:
        return None
    still, dead = int(log["no_norm"].sum()), log.filter("no_norm", "free").height
    spread = log.filter(~pl.col("free"), ~pl.col("all_cut"))
    lines = logged_lines(count, count, log["step"][0], log["step"][-1])
    each_step = "window" not in lines
    if each_step and spread["no_norm"].all() and len(spread) >= FEWEST_STILL:
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"gradient norm 0 in all {counted(len(spread), 'step')} with reward variance",
            message=(
                f"the gradient norm is 0 in {counted(still, 'step')} of {count:,}, {len(spread):,} of them with "
                "reward variance: no gradient reaches the parameters"
            ),
            evidence="the trainer's own log, a line for every step",
            advice="look for detached log-probs, frozen parameters, a broken autograd graph, or a release of DeepSpeed "
            "that drops or hides gradients: upgrade it",
        )
    if count < FEWEST_STILL or len(log.filter(loss.abs() < near_zero)) < count:
        return None
    if still == count:
        if count < FEWEST_LINES:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"loss and gradient norm are 0 in all of {lines}",
            message=f"the loss is below {near_zero:g} and the gradient norm is 0 in all of {lines}"
            + (": no group had reward variance" if dead == count else ""),
            evidence="the trainer's own log",
            advice="change the prompts or check the reward function: all responses to each prompt got the same reward"
            if dead == count
            else (
                "check that rewards vary within groups, that the mask keeps some tokens, and that the parameters are "
                "not frozen"
            ),
        )
    if len(log.filter(loss.round(DIGITS) == loss)) < count:
        return None
    beta, moved = "", len(log.filter(pl.col("norm") > 0))
    kl = log.filter(pl.col("kl") > 0, pl.col("kl").is_finite())["kl"].max()
    if isinstance(kl, float) and (log["logged"] == 0).all():
        # beta times the KL was rounded to 0 as well.
        beta = f"; if the loss has a KL term, its coefficient is below {number(DIGIT / 2 / kl)}"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=f"|loss| < {near_zero:g} in all of {lines}, rounded to four digits: {moved:,} have a nonzero gradient",
        message=(
            f"the losses of {lines} are printed with four digits, and the gradient norm is up to "
            f"{number(log.select(pl.max('norm')).item())}: the gradient is nonzero, only the printed loss is "
            f"rounded{beta}"
        ),
        evidence="the trainer's own log",
        advice=(
            "no action: on-policy the surrogate loss is near 0 by construction but its gradient is not; watch the "
            "reward and the gradient norm instead"
        ),
    )

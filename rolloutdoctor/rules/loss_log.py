"""Losses of about zero in a trainer's log, without rollouts; part of RDG002."""

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

from rolloutdoctor.ops.tally import Sums, largest, smallest
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Judgement, counted, logged_lines, number

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

DIGITS, DIGIT = 4, 1e-4
"""The transformers library rounds the loss that it logs to four digits."""

FEWEST_LINES, FEWEST_STILL = 10, 3
"""Logged lines that a verdict takes, and steps with reward variance and without a gradient."""


@dataclass(frozen=True)
class LoggedLosses(Sums):
    """What a log without rollouts adds up.

    Attributes:
        lines: logged lines with a loss and a gradient norm.
        small: those with a loss of about zero.
        rounded: those with a loss of at most four digits.
        zeros: those with a loss of exactly 0.
        alive: those with a gradient norm above 0.
        still: those with one of 0, which no rounding of the log made.
        no_spread: of `still`, those without reward variance in any group.
        spread: those in which some group had reward variance, and some response was finished.
        spread_still: of these, those with a gradient norm of 0.
        norm: largest gradient norm.
        kl: largest KL.
        first: step of the first line.
        last: step of the last.
    """

    lines: int = 0
    small: int = 0
    rounded: int = 0
    zeros: int = 0
    alive: int = 0
    still: int = 0
    no_spread: int = 0
    spread: int = 0
    spread_still: int = 0
    norm: float = largest()
    kl: float = largest()
    first: float = smallest()
    last: float = largest()


def read_log(step: "StepView", near_zero: float) -> LoggedLosses:
    """Read a line of a log without rollouts."""
    trainer, logged = step.writer, step.logged
    loss = None if trainer is None else logged.get(trainer.loss_metric)
    norm = None if trainer is None else logged.get(trainer.grad_norm_metric)
    if trainer is None or loss is None or norm is None or not step.training or not isfinite(loss):
        return LoggedLosses()
    if not 0 <= norm < inf:
        return LoggedLosses()
    free, kl = trainer.reward_free(logged), logged.get(trainer.kl_metrics[0], 0.0)
    ends = trainer.end_metrics
    told = free is False and not (ends is not None and logged.get(ends[0]) == 1)
    is_still = step.is_logged_as_zero(trainer.grad_norm_metric)
    return LoggedLosses(
        lines=1,
        small=int(abs(loss) < near_zero),
        rounded=int(round(loss, DIGITS) == loss),
        zeros=int(loss == 0),
        alive=int(norm > 0),
        still=int(is_still),
        no_spread=int(is_still and free is True),
        spread=int(told),
        spread_still=int(told and is_still),
        norm=norm,
        kl=kl if kl > 0 else 0.0,
        first=float(step.batch.step),
        last=float(step.batch.step),
    )


def judge_log(run: LoggedLosses, near_zero: float) -> Judgement | None:
    """What a log without rollouts tells of its losses."""
    lines = logged_lines(run.lines, run.lines, run.first, run.last)
    each_step = "window" not in lines
    if each_step and run.spread_still == run.spread >= FEWEST_STILL:
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=f"gradient norm 0 in all {counted(run.spread, 'step')} with reward variance",
            message=f"the gradient norm is 0 in {counted(run.still, 'step')} of {run.lines:,}, "
            f"{run.spread_still:,} of them with reward variance: nothing reaches the parameters",
            evidence="the trainer's own log, a line for every step",
            advice="look for detached log-probs, frozen parameters or a broken autograd graph",
        )
    if run.lines < FEWEST_LINES or run.small < run.lines:
        return None
    if run.still == run.lines:
        dead = run.no_spread == run.lines
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"loss and gradient norm are 0 in all of {lines}",
            message=f"the loss is below {near_zero:g} and the gradient norm is 0 in all of {lines}"
            + (": no group had reward variance" if dead else ""),
            evidence="the trainer's own log",
            advice="sample other prompts: all responses to these got the same reward"
            if dead
            else "check that rewards differ within groups, that some tokens are trained, and what is frozen",
        )
    if run.rounded < run.lines:
        return None
    beta = ""
    if run.kl > 0 and run.zeros == run.lines:
        # beta times the KL was rounded to 0 as well.
        beta = f"; a KL term in it has a coefficient below {number(DIGIT / 2 / run.kl)}"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=f"|loss| < {near_zero:g} in all of {lines}, rounded to four digits: {run.alive:,} have a gradient",
        message=f"the losses of {lines} are printed with four digits, and the gradient norm is up to "
        f"{number(run.norm)}: the gradient is there, the loss is rounded{beta}",
        evidence="the trainer's own log",
        advice="no action: on-policy the surrogate is near 0 by construction, its gradient is not; watch reward "
        "and gradient norm instead of the loss",
    )

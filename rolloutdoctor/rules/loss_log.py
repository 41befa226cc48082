"""Losses of about zero in a trainer's log, without rollouts; part of RDG002."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, logged_lines, number
from rolloutdoctor.rules.logged_quantities import SPREAD, is_reward_free, is_rounded

DIGITS, DIGIT = 4, 1e-4
"""The transformers library rounds the loss that it logs to four digits."""

FEWEST_LINES, FEWEST_STILL = 10, 3
"""Logged lines that a verdict takes, and steps with reward variance and without a gradient."""


SMALLEST, COARSE = 1e-5, 1e-3
"""Gradient norms that rounding may hide: one that is as good as none, and one that no usual update has."""

FEW_CUT = 0.1
"""Share of truncated responses up to which no step of a line of ten can be truncated as a whole."""

LOSSES = ("loss", "policy_loss")
"""Quantities that are a loss, the whole one first."""

READ = (*LOSSES, *SPREAD, "grad_norm", "kl", "clip_fraction", "truncated_share")
"""Quantities of a log that the verdict reads."""


def logged_losses(log: pl.DataFrame, context: Context) -> pl.DataFrame:
    """Return the lines of a log that have a loss and a gradient norm.

    Args:
        log: step, split, and a column for each of `READ`.
        context: what is known of the run.

    Returns:
        The `logged` loss, the `norm` of the gradient, whether that is 0 and no rounding made it so (`no_norm_logged`)
        or is printed as 0 (`no_norm_printed`), whether
        all groups lacked reward variance (`free`), whether rewards are known to differ within groups in each step of
        the line (`spread`), and whether all responses of a step may be masked, or all tokens clipped (`masked`).
    """
    norm, share = pl.col("grad_norm"), pl.col("zero_variance_share")
    zero, printed = (
        pl.lit(value=False) if is_rounded(context, "grad_norm", coarse) else norm == 0 for coarse in (SMALLEST, COARSE)
    )
    quantity = context.quantities.get("zero_variance_share")
    is_whole = (
        quantity is not None and not quantity[1].lower_bound and not is_rounded(context, "zero_variance_share", COARSE)
    )
    return log.select(
        *STEP_KEY,
        logged=pl.coalesce(*LOSSES),
        norm=norm,
        no_norm_logged=zero,
        no_norm_printed=printed,
        kl_logged="kl",
        free=is_reward_free(context),
        spread=(share == 0) & pl.lit(is_whole),
        # Responses that were cut off may be masked, all of them in the last step of a line.
        masked=((pl.col("truncated_share") > FEW_CUT) | (pl.col("clip_fraction") == 1)).fill_null(value=False),
        all_masked=((pl.col("truncated_share") == 1) | (pl.col("clip_fraction") == 1)).fill_null(value=False),
    ).filter(pl.col("logged").is_finite(), pl.col("norm").is_finite(), pl.col("norm") >= 0)


def judge_log(log: pl.DataFrame, near_zero: float, context: Context) -> Judgement | None:
    """Judge the losses of a log without rollouts.

    Args:
        log: the lines of `logged_losses`.
        near_zero: a loss below it is about zero.
        context: what is known of the run.
    """
    loss, count, each_step = pl.col("logged"), len(log), context.logs_each_step
    if not count:
        return None
    still, dead = int(log["no_norm_logged"].sum()), log.filter("no_norm_logged", "free").height
    lines = logged_lines(count, log["step"].to_list(), each_step=each_step)
    # The line of step 1 is of no other step.
    is_first = pl.lit(not context.counted_steps) & (pl.col("step") == 1)
    broken = _without_gradient(log, is_first | (each_step or (count > 1 and "window" not in lines)))
    if broken is not None:
        return broken
    if len(log.filter(loss.abs() < near_zero)) < count:
        return None
    if still == count:
        return None if count < FEWEST_LINES else _still(lines, near_zero, is_free=dead == count)
    beta, moved = "", log.filter(pl.col("norm") > (0 if count >= FEWEST_STILL else COARSE))
    if not len(moved) or len(log.filter(loss.round(DIGITS) == loss)) < count:
        return None
    kl = log.filter(pl.col("kl_logged") > 0, pl.col("kl_logged").is_finite())["kl_logged"].max()
    if isinstance(kl, float) and (log["logged"] == 0).all():
        # beta times the KL was rounded to 0 as well.
        beta = f"; if the loss has a KL term, its coefficient is below {number(DIGIT / 2 / kl)}"
    have = f"{len(moved):,} have" if count > 1 else "it has"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=f"|loss| < {near_zero:g} in {'all ' if count > 1 else ''}{lines}, as printed with four digits: {have} "
        "a nonzero gradient",
        message=(
            f"the losses of {lines} are printed with four digits, and the gradient norm is up to "
            f"{number(log.select(pl.max('norm')).item())}: the gradient is nonzero, only the printed loss is "
            f"rounded{beta}"
        ),
        evidence="the trainer's own log",
        advice=(
            "watch the reward and the gradient norm instead: on-policy the surrogate loss is near 0 by construction, "
            "but its gradient is not"
        ),
        remark=_as_printed(log["logged"], moved["norm"], lines),
    )


def _still(lines: str, near_zero: float, *, is_free: bool) -> Judgement:
    """Say that neither loss nor gradient is there in any line, and why if no group had reward variance."""
    return Judgement(
        severity=Severity.WARNING,
        confirmed=True,
        headline=f"loss and gradient norm are 0 in all {lines}",
        message=f"the loss is below {near_zero:g} and the gradient norm is 0 in all {lines}"
        + (": no group had reward variance" if is_free else ""),
        evidence="the trainer's own log",
        advice="change the prompts or check the reward function: all responses to each prompt got the same reward"
        if is_free
        else (
            "check that rewards vary within groups, that the mask keeps some tokens, and that the parameters are "
            "not frozen"
        ),
    )


def _as_printed(losses: pl.Series, norms: pl.Series, lines: str) -> str:
    """Say that losses are 0 only as they are printed, if all are 0 and all have a gradient."""
    if (losses != 0).any() or len(norms) < len(losses):
        return ""
    low, high = (number(float(value)) for value in norms.sort().to_numpy()[[0, -1]])
    norm = low if low == high else f"{low} to {high}"
    return f"the loss is 0 only as printed, with four digits: the gradient norm is {norm} in {lines}"


def _without_gradient(log: pl.DataFrame, is_of_one: pl.Expr) -> Judgement | None:
    """Judge lines in which rewards differ within groups and the gradient norm is 0.

    A line may be of several steps, unless it `is_of_one`, with the gradient norm of the last: then rewards have to
    differ in each of them.
    """
    differs = log.filter((pl.col("spread") | (~pl.col("free") & is_of_one)).fill_null(value=False))
    unmasked = differs.filter(~pl.col("masked"))
    unless = "" if len(unmasked) else ", unless every response of the groups with variance was truncated and masked"
    unmasked = unmasked if len(unmasked) else differs.filter(~pl.col("all_masked"))
    still = unmasked.filter("no_norm_printed")
    if not len(still):
        return None
    proved = bool(still["no_norm_logged"].all()) and not unless
    is_all = len(still) == len(unmasked)
    # Where some norms are printed, a smaller one may be rounded to 0, and some responses may be masked in any line.
    if not proved and not is_all:
        return None
    first, lines = still["step"][0], counted(len(still), "step")
    where = (
        f"in step {first}" if len(still) == 1 else f"in all {lines}" if is_all else f"in {lines} of {len(unmasked):,}"
    )
    is_exact = bool(still["no_norm_logged"].all())
    return Judgement(
        severity=Severity.ERROR if proved and is_all and len(still) >= FEWEST_STILL else Severity.WARNING,
        confirmed=proved,
        headline=f"the gradient norm is {'' if is_exact else 'printed as '}0 {where} with reward variance: no gradient "
        f"reaches the parameters{unless}",
        message=(
            f"The gradient norm is {'exactly' if is_exact else 'rounded to'} 0 {where} in which rewards differ within "
            f"groups, so that advantages are not 0: with a policy term in the loss that cannot be{unless}."
        ),
        evidence="the logged gradient norm and the logged share of zero-variance groups, or the logged advantages",
        advice="look for detached log-probs, frozen parameters, a broken autograd graph, or a release of DeepSpeed "
        "that drops or hides gradients: upgrade it",
        measures={"onset": Measure(first, "step")},
    )

"""An importance ratio that several updates of a batch leave at 1, from the trainer's log alone."""

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import logged
from rolloutdoctor.rules.table_rule import Measured

_DIGIT = 1e-6
"""Nats: a mean that several updates move by less was rounded to 0 by no log with seven decimals."""


def updates_of(context: Context) -> int | str | None:
    """Updates of a batch, or the options that say; None without a trainer."""
    trainer, config = context.trainer, context.config
    return None if trainer is None or config is None else trainer.updates.a_batch(config)


def several_updates(context: Context) -> str | None:
    """Say that the options state several updates of a batch; None if they do not."""
    updates = updates_of(context)
    return f"the options state {updates:,} updates per batch" if isinstance(updates, int) and updates > 1 else None


def pinned(run: Measured, context: Context, several: str, fewest: int) -> Judgement | None:
    """Warn of log-probs that later updates of a batch do not move: the old ones are the policy's own."""
    drift = logged(run, "ppo_kl")
    if drift is None or len(drift) < fewest or drift.any() or is_rounded(context, "ppo_kl", _DIGIT):
        return None
    words = f"the log-probs move by exactly 0 nats in all {counted(len(drift), 'logged step')} although {several}"
    return Judgement(
        severity=Severity.WARNING,
        confirmed=False,
        headline=f"{words}: the ratio is 1 throughout, and clips nothing",
        message=f"{words}: the old log-probs are those of the policy under update, or the updates change no weight",
        evidence="the logged mean of old minus new log-probs, and the options",
        advice="keep the old log-probs of the batch from before its first update",
    )

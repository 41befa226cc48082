"""RDT019: the mean reward follows the mean response length from step to step, from the trainer's log alone."""

from math import atanh, sqrt, tanh
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, percent
from rolloutdoctor.rules.logged_quantities import of_distillation
from rolloutdoctor.rules.numbers_rule import NumbersRule, series
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values

_REPEATED = 1.5
"""Variance of a correlation of differences over that of as many independent pairs: neighbours share a value."""

_ROUNDING = 1e-9
"""Of the size of a series, changes below which are rounding."""

_FAR = 4.5
"""Median changes, three standard deviations of normal ones: what is beyond is an event and no habit."""


class LengthRewarded(NumbersRule):
    """The mean reward rises and falls with the mean response length from step to step: length is what is rewarded.

    ## What it does
    Correlates the changes of the logged reward from one step to the next with those of the response length.

    ## Why it matters
    A policy learns what its reward distinguishes. Where that is the length alone, it learns to write to the limit or to
    stop at once, whatever the task, and the reward curve looks like progress.

    ## How it is measured
    `length_share` is the squared correlation of the changes, which a common trend cannot produce, and
    `length_share_low` its lower bound by three standard errors of Fisher's z; neighbouring changes share a value, so
    three count for two. In both a change counts as 4.5 median ones at most: a collapse takes reward and length down in
    a step or two. `reward_per_100_tokens` is the slope. If the truncated share is logged and changes, what it
    explains is taken out of both: a truncated response without an answer is no reward for length. It is a warning if
    the bound is above two thirds. Confirmed: the log shows what the mean reward follows, not why. In recorded rollouts
    `RDA019` measures it within groups.

    ## What to do
    Compare rewards of responses of one length. Remove the length term, or normalize the judge by length; if the task is
    a length, this is no fault.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> lengths = [300 + 40 * (step**2 % 11) for step in range(30)]
    >>> diagnose_log("RDT019", response_length=lengths, reward=[each / 500 for each in lengths])
    'RDT019 warning confirmed: reward 0.9147'
    """

    code = "RDT019"
    name = "length-rewarded"
    references = ("https://arxiv.org/abs/2310.03716", "https://arxiv.org/abs/2503.20783")
    about = ("reward", "response_length")
    beside = ("truncated_share",)

    fewest: int = 20
    errors: float = 3.0
    """Standard errors of the bound: one in 700 correlations of the bound itself is above it by chance."""
    least: float = 2 / 3
    """Share of the variance: at the bound, length weighs twice as much as all that else changes the reward."""

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts with lengths, which say it themselves, or a training without a reward."""
        is_in_rows = context.columns >= {"reward", "group_id", "response_mask"}
        return "with rollouts RDA019 tests this" if is_in_rows else of_distillation(context)

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps of the longest responses."""
        return table.with_columns(value="response_length")

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Correlate the changes, with those of the truncated share taken out where it is logged."""
        import numpy as np

        rewards, lengths = (_changes(series(run, name)) for name in self.about)
        pairs, share = [(rewards, lengths)], series(run, "truncated_share")
        if np.isfinite(share).all() and (cut := _changes(share)).any():
            pairs.append((_without(rewards, cut), _without(lengths, cut)))
        least = min(abs(_correlation(*map(_bounded, pair))) for pair in pairs)
        error = sqrt(_REPEATED / (len(rewards) - 3 * _REPEATED))
        low = tanh(atanh(min(least, 1 - 1e-12)) - self.errors * error)
        if low <= 0 or low**2 <= self.least:
            return None
        slope = float((rewards * lengths).sum() / (lengths**2).sum())
        moves = f"100 more tokens {'raise' if slope > 0 else 'lower'} it by {number(abs(100 * slope))}"
        words = f"response length explains {percent(least**2)} of the step-to-step changes of the mean reward"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"{words}: {moves}",
            message=f"{words}, at least {percent(low**2)}; {moves}.",
            evidence=f"the changes of the logged reward and length over {counted(len(run.table), 'step')}",
            advice="compare rewards of responses of one length; remove the length term unless the task is a length",
            measures={
                "length_share": Measure(least**2, "share"),
                "length_share_low": Measure(low**2, "share"),
                "reward_per_100_tokens": Measure(100 * slope, "reward"),
            },
        )


def _changes(values: "Values") -> "Values":
    """Return the changes from step to step less their mean, which is the trend."""
    import numpy as np

    changes = np.diff(values)
    return _rounded(changes - changes.mean(), values)


def _bounded(changes: "Values") -> "Values":
    """Return changes of which none is far from the others."""
    import numpy as np

    centred = _rounded(changes - np.median(changes), changes)
    limit = _FAR * np.median(np.abs(centred))
    bounded = centred.clip(-limit, limit)
    return _rounded(bounded - bounded.mean(), bounded)


def _without(values: "Values", others: "Values") -> "Values":
    """Return values less what is proportional to others."""
    return _rounded(values - others * float((values * others).sum() / (others**2).sum()), values)


def _rounded(values: "Values", scale: "Values") -> "Values":
    """Return values, 0 where they are rounding of others."""
    import numpy as np

    return np.where(np.abs(values) > _ROUNDING * np.abs(scale).max(), values, 0.0)


def _correlation(first: "Values", second: "Values") -> float:
    """Correlation of two series of mean 0; 0 where one of them does not change."""
    size = sqrt(float((first**2).sum()) * float((second**2).sum()))
    return float((first * second).sum()) / size if size else 0.0

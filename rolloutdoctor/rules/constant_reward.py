"""RDT002: the reward never changes, from the trainer's log alone."""

from dataclasses import dataclass

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.numbers_rule import NumbersRule, is_rounded, logged, series, step_at
from rolloutdoctor.rules.table_rule import Measured


@dataclass(frozen=True)
class ConstantReward(NumbersRule):
    """The mean reward is the same number in every logged step.

    ## What it does
    Compares the logged rewards of all steps with each other.

    ## Why it matters
    A mean over sampled responses varies. One that never does is of a reward function that returns a constant: it
    crashed and fell back, it compares with an empty answer, or it parses no response.

    ## How it is measured
    `distinct` is the number of different logged rewards. One value in ten or more logged steps is an error where the
    standard deviation of the rewards is logged as 0, or every group is of zero variance; else a warning: batches of
    equal mean happen where a reward is standardized before it is logged. Confirmed where the deviation is logged.

    ## What to do
    Call the reward function on some responses of the log, and look at what it returns and which exceptions it catches.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT002", reward=[0.0] * 12, reward_std=[0.0] * 12)
    'RDT002 error confirmed: reward 0'
    """

    code = "RDT002"
    name = "constant-reward"
    references = ("https://github.com/huggingface/trl/issues/2703",)
    about = ("reward",)
    beside = ("reward_std", "zero_variance_share")

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Every step."""
        return table.with_columns(value=pl.lit(1.0))

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """One value."""
        import numpy as np

        rewards = series(run, "reward")
        if np.ptp(rewards) > 0:
            return None
        spread, share = logged(run, "reward_std"), logged(run, "zero_variance_share")
        flat = spread is not None and not spread.any() and not is_rounded(context, "reward_std")
        flat |= share is not None and bool(share.min() == 1)
        value = number(float(rewards[0]))
        return Judgement(
            severity=Severity.ERROR if flat else Severity.WARNING,
            confirmed=flat,
            headline=f"the reward is {value} in all {len(rewards):,} logged steps",
            message=f"The reward is {value} in {counted(len(rewards), 'logged step')}"
            + (", and so is that of every response: nothing is learned." if flat else "."),
            evidence="the logged standard deviation is 0, or every group is of zero variance"
            if flat
            else "the logged rewards",
            advice="call the reward function on some responses; look at what it returns and which errors it catches",
            measures={"onset": Measure(step_at(run, 0), "step")},
        )

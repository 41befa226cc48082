"""RDT001: the share of groups without a spread of rewards, from the trainer's log alone."""

from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.logged_quantities import by_step, is_rounded, not_logged, of_distillation
from rolloutdoctor.rules.measures.untrained_share import grew, untrained_share
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.series import ending
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    import numpy as np

_ADVICE = "use prompts that are neither solved nor too hard, drop zero-variance groups, or check the reward function"


class ZeroVarianceShare(NumbersRule):
    """Most groups have equal rewards: their responses train nothing.

    ## What it does
    Reads the logged share of zero-variance groups, and from which step on it is 1.

    ## Why it matters
    A group whose rewards are all equal has advantages of 0 and trains nothing. Where every group is such a group, the
    policy gets no gradient but that of the KL: the step is paid for and nothing is learned.

    ## How it is measured
    `zero_variance_share` is the mean of the logged shares, which is the share of responses that trained nothing. It is
    an error if the share is 1 in each of the last five logged steps or more, and a warning if all rewards there are the
    largest of the run: the prompts are solved. It is a warning if its mean over the last third of the steps is above
    0.9, and information if that over all steps is 0.4 or more, or if it is 0.5 or more in the last third, below 0.5
    over all, and grew by three standard errors. It is no error if such steps were so common before that those at the
    end may be chance: their earlier share, to the power of their number at the end, has to be below 1 in
    1,000. If the share is not logged, a standard deviation of the rewards that is exactly 0 proves that every group of
    the line has equal rewards: the share of such lines, of those that log one, is a lower bound. Six decimals are
    enough, as in the table of a notebook, and fewer if the smallest other deviation is above 0.01. With fewer than ten
    lines it is a warning if the share is above 0.9 in each, and information if it is 0.5 or more. Confirmed: the log
    itself is the proof. For recorded rollouts `RDA011` says the same.

    ## What to do
    All rewards at their highest: the prompts are solved, take harder ones. All at their lowest: the prompts are too
    hard, or the verifier is broken; read some responses. Filter such groups before the update (`DAPO`'s dynamic
    sampling), or sample more responses to a prompt.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT001", zero_variance_share=[0.2] * 10 + [1.0] * 10, reward=[0.5] * 10 + [0.0] * 10)
    'RDT001 error confirmed: zero_variance_share 0.6'
    """

    code = "RDT001"
    name = "zero-variance-share"
    references = ("https://arxiv.org/abs/2503.14476",)
    about = ("zero_variance_share",)
    beside = ("reward_std", "reward", "reward_max")

    many: float = 0.4
    most: float = 0.9
    lasting: int = 5
    chance: float = 1e-3
    late: float = 0.5
    errors: float = 3.0
    distinct: float = 0.01
    """Smallest deviation but 0, a hundred times the last of four decimals, beside which 0 is no rounded one."""

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts, which say it themselves."""
        return "with rollouts RDA011 tests this" if context.has_rows else of_distillation(context)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log with neither the share nor a deviation of the rewards."""
        either = context.quantities.keys() & {"zero_variance_share", "reward_std"}
        return None if either else not_logged(context, "zero_variance_share")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """With a share of at least 1 or 0 where a deviation of exactly 0, or above, is all that is logged."""
        logged_share = pl.col("zero_variance_share")
        spread = pl.col("reward_std").fill_nan(None)
        is_exact = pl.lit(not is_rounded(context, "reward_std", coarse=1e-5))
        proved = (spread == 0) & (is_exact | (spread.filter(spread > 0).min() > self.distinct).fill_null(value=False))
        share = pl.coalesce(logged_share, proved.cast(pl.Float64))
        return (
            by_step(run, context, (*self.about, *self.beside))
            .with_columns(zero_variance_share=share, is_least=logged_share.is_null(), lines=pl.len())
            .filter(pl.col("zero_variance_share").is_finite())
            .sort("step")
        )

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge few lines, each of which is at least half zero-variance groups: one is enough."""
        values = series(run, "zero_variance_share")
        if not len(values) or not ((values >= self.late) & (values <= 1)).all():
            return None
        is_most = bool((values > self.most).all())
        where = f"step {step_at(run, 0)}" if len(values) == 1 else f"all {len(values):,} logged steps"
        is_whole = bool((values == 1).all())
        share = "every group" if is_whole else f"{percent(float(values.mean()))} of the groups"
        return Judgement(
            severity=Severity.WARNING if is_most else Severity.INFO,
            confirmed=True,
            headline=f"{share} of {where} {'is' if is_whole else 'are'} zero-variance: their advantages are 0",
            message=f"In {where}, {share} had equal rewards and trained nothing.",
            evidence="the logged share of zero-variance groups",
            advice=_ADVICE,
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the end of the run first."""
        import numpy as np

        values = series(run, "zero_variance_share")
        if values.max() > 1 or values.min() < 0:
            return None
        since = ending(values == 1, self.lasting, self.chance)
        late = float(values[-max(1, len(values) // 3) :].mean())
        mean = float(values.mean())
        has_grown = grew(values, self.late, self.errors)
        if since is None and late <= self.most and mean < self.many and not has_grown:
            return None
        onset = None if since is None else step_at(run, since)
        advice, is_solved, remark = _ADVICE, False, ""
        if since is not None and onset is not None:
            dead = len(values) - since
            headline = f"every group is zero-variance from step {onset} on: all advantages are 0"
            message = f"From step {onset} on, in {counted(dead, 'logged step')}, every group has equal rewards."
            rewards = series(run, "reward")
            before, after = rewards[:since], rewards[since:]
            if len(after) and np.ptp(after) == 0:
                value = number(float(after[0]))
                highest = np.concatenate([before, series(run, "reward_max")[:since]])
                is_solved = bool(len(before)) and float(after[0]) >= np.nanmax(highest)
                headline = f"every reward is {value} from step {onset} on" + (
                    ", the largest of the run: nothing is left to learn from these prompts"
                    if is_solved
                    else ", so every group is zero-variance and every advantage is 0"
                )
                advice = _advice(value, onset, before, float(after[0]))
        else:
            words = untrained_share(run, values, has_grown=has_grown)
            headline, message, remark = words.headline, words.message, words.headline
        return Judgement(
            severity=Severity.WARNING
            if is_solved or (onset is None and late > self.most)
            else Severity.INFO
            if onset is None
            else Severity.ERROR,
            confirmed=True,
            headline=headline,
            message=message,
            evidence=f"the logged share of zero-variance groups in {counted(len(values), 'step')}",
            advice=advice,
            measures={} if onset is None else {"onset": Measure(onset, "step")},
            remark=remark,
            hinders=bool(remark),
        )


def _advice(value: str, onset: int, before: "np.ndarray", after: float) -> str:
    """Say what to look at where all rewards are one value, by where that lies among the rewards before."""
    if len(before) and after < before.min():
        return f"run the reward function on responses from step {onset} on: it returns {value} for all of them"
    if len(before) and after >= before.max():
        return "the prompts are solved: use harder ones, or drop zero-variance groups"
    return f"check by hand whether {value} is the right reward for some responses; if it is, change the prompts"

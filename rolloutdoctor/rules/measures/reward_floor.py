"""A mean reward that is the least of the run in nearly every step."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import series
from rolloutdoctor.rules.table_rule import Measured


def mostly_least(run: Measured, context: Context, share: float) -> Judgement | None:
    """Say that the rewards of such a share of the steps or more, not all of them, are one number, the least.

    A mean of sampled responses repeats a number to the last digit where all of them have that reward.
    """
    rewards = series(run, "reward")
    least, lines = float(rewards.min()), len(rewards)
    same = int((rewards == least).sum())
    if same < share * lines or same == lines or is_rounded(context, "reward"):
        return None
    words = f"the reward is {number(least)} in {same:,} of {counted(lines, 'logged step')}"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}, and above that in {lines - same:,}: the others have nothing to learn from.",
        evidence="the logged rewards",
        advice="take easier prompts, or give a part of the reward for a part of the answer; read some responses",
        measures={"least_share": Measure(same / lines, "share")},
        hinders=True,
    )

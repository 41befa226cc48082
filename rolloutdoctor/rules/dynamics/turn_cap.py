"""RDT018: every trajectory runs to the cap on turns, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, percent
from rolloutdoctor.rules.logged_quantities import NO_SUCH_METRIC
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.series import ending
from rolloutdoctor.rules.table_rule import Measured

ONE_EXCHANGE = 2
"""Turns of a question and its answer."""


class TurnCap(NumbersRule):
    """Every trajectory runs to the cap on turns, none ends by itself.

    ## What it does
    Looks for steps at the end of the log in which all trajectories took the same number of turns, the largest of the
    run, or in which nearly all reached the cap that the trainer logs.

    ## Why it matters
    A trajectory that is cut off at the cap has mostly not given its answer. Where all are, rewards are equal and the
    advantages 0, or the reward pays for what comes before the end.

    ## How it is measured
    `turn_cap_share` is the logged share of trajectories that reached the cap: a warning if it is 0.9 or more in each of
    the last five logged steps or more. Without it, the smallest and the largest number of turns of a step must be equal
    there, more than two, the same in all these steps, and no step of the run may have more: a warning if they differed
    before, information if they never did, since an environment may have a fixed number of turns. If such steps are as
    common before, those at the end are chance: their earlier share, to the power of their number at the end, has to be
    below 1 in 1,000. Confirmed: the log itself is the proof.

    ## What to do
    Read trajectories of the first such step: they may repeat a call whose result they do not see, or never give the
    answer in the form that ends an episode. Raise the cap, or penalize turns before it is reached.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT018", turns_min=[2] * 10 + [8] * 10, turns_max=[8] * 20)
    'RDT018 warning confirmed: turns_min 5'
    """

    code = "RDT018"
    name = "turn-cap"
    references = ("https://github.com/radixark/miles/issues/3221", "https://github.com/verl-project/verl/issues/6673")
    beside = ("turn_cap_share", "turns_min", "turns_max")

    lasting: int = 5
    chance: float = 1e-3
    most: float = 0.9

    def inapplicable_reason(self, context: Context) -> str | None:
        """A trainer of several turns logs the share, or both ends of their number."""
        quantities = context.quantities.keys()
        either = "turn_cap_share" in quantities or {"turns_min", "turns_max"} <= quantities
        return None if either else NO_SUCH_METRIC

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the end of the run."""
        share, low, high = (series(run, name) for name in self.beside)
        since = ending(share >= self.most, self.lasting, self.chance)
        if since is not None:
            return _judged(
                run, since, f"{percent(float(share[since:].mean()))} of the trajectories reach the cap on turns"
            )
        most = high[-1]
        since = ending((low == most) & (high == most) & (most > ONE_EXCHANGE), self.lasting, self.chance)
        if since is None or (high > most).any():
            return None
        is_fixed = not since or bool((low[:since] == high[:since]).all())
        return _judged(run, since, f"every trajectory takes {number(float(most))} turns", is_fixed=is_fixed)


def _judged(run: Measured, since: int, subject: str, *, is_fixed: bool = False) -> Judgement:
    lines = counted(len(run.table) - since, "logged step")
    return judged_at_cap(
        step_at(run, since), lines, subject, "the logged numbers of turns", whole=not since, fixed=is_fixed
    )


def judged_at_cap(onset: int, lines: str, subject: str, evidence: str, *, whole: bool, fixed: bool) -> Judgement:
    """Say since when; a number of turns that is fixed throughout may be the environment's.

    Args:
        onset: step from which on it is so.
        lines: how many steps that are, in words.
        subject: what is so.
        evidence: what shows it.
        whole: it is so in the whole run.
        fixed: the number of turns never was another one.
    """
    return Judgement(
        severity=Severity.INFO if fixed else Severity.WARNING,
        confirmed=True,
        headline=f"{subject} in all of {lines}" if whole else f"{subject} from step {onset} on",
        message=f"{subject[0].upper()}{subject[1:]}, in {lines} from step {onset} on.",
        evidence=evidence,
        advice=(
            f"read trajectories of step {onset}: look for calls that are repeated and answers that do not end the "
            "episode; raise the cap on turns, or penalize turns before it is reached"
        ),
        measures={"onset": Measure(onset, "step")},
    )

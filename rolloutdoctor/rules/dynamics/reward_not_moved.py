"""RDT016: the reward at the end is that of the start, within its noise, from the trainer's log alone."""

from dataclasses import dataclass

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.dynamics.reward_collapse import RewardCollapse
from rolloutdoctor.rules.logged_quantities import of_distillation
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, levels, series, step_at
from rolloutdoctor.rules.series import change_of_means, memory
from rolloutdoctor.rules.table_rule import Measured


@dataclass(frozen=True)
class RewardNotMoved(NumbersRule):
    """The mean reward of the last third of the run is that of the first third, within two standard errors.

    ## What it does
    Compares the logged rewards of the last third with those of the first, and says what else stands still.

    ## Why it matters
    It is the most frequent outcome of public runs, and no curve says it: a run of which nothing is known to be wrong
    and that learned nothing yet. Either it is too short, or the reward has no signal that the policy can follow.

    ## How it is measured
    `reward_change` is the mean over the last third minus that over the first, `reward_low` and `reward_high` its
    interval of two standard errors, from the spread within each third and the correlation of neighbouring steps. For
    three to nineteen lines, if the learning rate has decayed below 1 % of its largest value, the first and the last are
    compared, within two standard deviations of all. It is information if 0 lies in the interval and the reward did not
    collapse in between (`RDT005`). Confirmed.

    ## What to do
    Sample more responses a step, or train longer, before you call it a failure; look at the share of zero-variance
    groups, at the learning rate and at whether KL and entropy moved.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT016", reward=[0.4, 0.5, 0.6] * 10)
    'RDT016 info confirmed: reward 0.5'
    """

    code = "RDT016"
    name = "reward-not-moved"
    references = ("https://arxiv.org/abs/2503.14476",)
    about = ("reward",)
    beside = ("kl", "entropy", "reward_min", "learning_rate")

    fewest: int = 20
    errors: float = 2.0
    few: int = 3
    still: float = 0.1
    ended: float = 0.01
    small_kl: float = 1e-3

    def inapplicable_reason(self, context: Context) -> str | None:
        """A training without a reward."""
        return of_distillation(context)

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge a few steps of a training whose learning rate decayed to nothing: it is over."""
        if len(run.table) < self.few:
            return None
        values, rate = series(run, "reward"), series(run, "learning_rate")
        first, last = float(values[0]), float(values[-1])
        is_over = rate[-1] <= self.ended * rate.max()  # NaN where it is not logged
        if not is_over or values.max() == values.min() or abs(last - first) > self.errors * float(values.std(ddof=1)):
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"the reward has not moved: {number(first)} at step {step_at(run, 0)}, {number(last)} at step "
            f"{step_at(run, -1)}, while the learning rate went {from_to(float(rate.max()), float(rate[-1]))}",
            message=f"The rewards of {counted(len(values), 'logged step')} lie between {number(float(values.min()))} "
            f"and {number(float(values.max()))}, and the learning rate has decayed.",
            evidence=f"{counted(len(values), 'logged step')}",
            advice="look at more steps, at the share of zero-variance groups and at the reward function",
            measures={"reward_change": Measure(last - first, "reward")},
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the thirds."""
        values = series(run, "reward")
        third = len(values) // 3
        first, last = values[:third], values[-third:]
        change, error = change_of_means(first, last, memory(values))
        if values.max() == values.min() or abs(change) > self.errors * error:
            return None
        if RewardCollapse().judge_log(run, context) is not None:
            return None
        low, high = change - self.errors * error, change + self.errors * error
        beside = self._standing_still(run)
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"the reward has not moved: {number(float(first.mean()))} in the first third, "
            f"{number(float(last.mean()))} in the last ({low:+.2g} to {high:+.2g}){beside}",
            message=f"The mean reward changed by {change:+.2g}, with an interval of {low:+.2g} to {high:+.2g}{beside}.",
            evidence=f"{counted(third, 'logged step')} at either end",
            advice="train longer or sample more responses a step before you judge; look at the learning rate and the "
            "share of zero-variance groups",
            measures={
                "reward_change": Measure(change, "reward"),
                "reward_low": Measure(low, "reward"),
                "reward_high": Measure(high, "reward"),
            },
        )

    def _standing_still(self, run: Measured) -> str:
        """Name what else did not move."""
        kl, entropy = levels(run, "kl"), levels(run, "entropy")
        found = ["the KL"] if kl is not None and abs(kl.last) < self.small_kl else []
        if entropy is not None and abs(entropy.change) < self.still * abs(entropy.first):
            found.append("the entropy")
        are = "are where they were" if len(found) > 1 else "is where it was"
        return f"; {' and '.join(found)} {are}" if found else ""

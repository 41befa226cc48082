"""RDT016: the reward at the end is that of the start, within its noise, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, own_name
from rolloutdoctor.rules.dynamics.reward_collapse import RewardCollapse
from rolloutdoctor.rules.logged_quantities import of_distillation
from rolloutdoctor.rules.numbers_rule import NumbersRule, levels, logged, series, step_at
from rolloutdoctor.rules.series import errors_of_ends, thirds
from rolloutdoctor.rules.table_rule import Measured


class RewardNotMoved(NumbersRule):
    """The mean reward of the last third of the run is that of the first third, or the policy hardly moved.

    ## What it does
    Compares the logged rewards of the last third with those of the first; looks at the KL and the learning rates.

    ## Why it matters
    It is the most common outcome of public runs, and easy to miss on a curve: nothing is known to be wrong, but nothing
    has been learned yet. Either the run is too short, or the reward has no signal that the policy can follow.

    ## How it is measured
    `reward_change` is the mean over the last third minus that over the first, `reward_low` and `reward_high` its
    interval of two standard errors, from the spread within each third and the correlation of neighbouring steps. It is
    information if 0 lies in the interval, the medians of the first and the last tenth of 40 lines or more differ by no
    more than six standard errors (a rise at once, within the first third) and the reward did not collapse in between
    (`RDT005`). A fall by more than 1.5 standard errors, as noise makes once in 15 times, is none that has not moved: it
    "did not rise". Fewer than 20 lines are too few to tell. Confirmed.

    The policy hardly moved if its KL from the reference is below 0.001 nats in all of ten lines or more (`kl_largest`),
    or if the learning rates of all steps add up to less than 1e-6 (`rate_sum`), by which Adam moves a weight at most,
    and the reward changed by no more than three standard errors. A KL of 0 throughout was not computed.

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
    errors_of_fall: float = 1.5
    errors_of_ends: float = 6.0
    still: float = 0.1
    small_kl: float = 1e-3
    """Nats a token: of a response of 400 tokens the log-prob then changed by less than half a nat."""
    small_sum: float = 1e-6
    """A ten-thousandth of a weight's usual size of 0.01."""
    fewest_still: int = 10
    errors_of_still: float = 3.0
    """Standard errors of the reward beside a policy that hardly moved: two are reached by one such run in twenty."""

    def inapplicable_reason(self, context: Context) -> str | None:
        """A training without a reward."""
        return of_distillation(context)

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge a few steps of a policy that hardly moved: of no others they tell that the reward has not."""
        return self._still(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the thirds."""
        if (still := self._still(run, context)) is not None:
            return still
        values = series(run, "reward")
        first, last, change, error = thirds(values)
        if values.max() == values.min() or abs(change) > self.errors * error:
            return None
        if change * (of_ends := errors_of_ends(values)) > 0 and abs(of_ends) > self.errors_of_ends:
            return None
        if RewardCollapse().judge_log(run, context) is not None:
            return None
        low, high = change - self.errors * error, change + self.errors * error
        remark = self._standing_still(run)
        went = "did not rise" if change < -self.errors_of_fall * error else "has not moved"
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"the reward {went}: {number(first)} in the first third, "
            f"{number(last)} in the last (change of {low:+.2g} to {high:+.2g}){remark}",
            message=f"The mean reward changed by {change:+.2g} ({low:+.2g} to {high:+.2g} within two standard "
            f"errors){remark}.",
            evidence=f"{counted(len(values) // 3, 'logged step')} at either end",
            advice="train longer or sample more responses a step before you judge; look at the learning rate and the "
            "share of zero-variance groups",
            measures={
                "reward_change": Measure(change, "reward"),
                "reward_low": Measure(low, "reward"),
                "reward_high": Measure(high, "reward"),
            },
        )

    def _still(self, run: Measured, context: Context) -> Judgement | None:
        """Say that the policy hardly moved, where the KL or the learning rates tell it and the reward does not rise."""
        values = series(run, "reward")
        if len(values) < self.fewest_still:
            return None
        first, last, change, error = thirds(values)
        cause = self._small_kl(run) or self._small_rates(run, context)
        if cause is None or values.max() == values.min() or abs(change) > self.errors_of_still * error:
            return None
        why, measures = cause
        low, high = change - self.errors * error, change + self.errors * error
        rewards = (
            f"{number(first)} in the first third, {number(last)} in the last (change of {low:+.2g} to {high:+.2g})"
        )
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"the policy hardly moved: {why}; the reward is {rewards}",
            message=f"The policy hardly moved: {why}. The mean reward is {rewards}.",
            evidence=f"{counted(len(values), 'line')} of the log",
            advice=f"raise {own_name(context, 'the learning rate')} or train longer before you judge the reward",
            measures={"reward_change": Measure(change, "reward"), **measures},
        )

    def _small_kl(self, run: Measured) -> tuple[str, dict[str, Measure]] | None:
        """Say that the KL is next to 0 in every line that has one; None if it is not."""
        import numpy as np

        values = logged(run, "kl")
        if values is None or len(values) < self.fewest_still or not (largest := float(np.abs(values).max())):
            return None
        if largest >= self.small_kl:
            return None
        words = f"the KL is at most {number(largest)} nats in all {counted(len(values), 'line')} of the log"
        return words, {"kl_largest": Measure(largest, "nats")}

    def _small_rates(self, run: Measured, context: Context) -> tuple[str, dict[str, Measure]] | None:
        """Say that the learning rates of all steps are next to nothing together; None if they are not, or not known."""
        values = logged(run, "learning_rate")
        if values is None or context.counted_steps or values.min() < 0:
            return None
        steps = step_at(run, -1) - step_at(run, 0) + 1
        if not 0 < (total := float(values.mean()) * steps) < self.small_sum:
            return None
        words = f"the learning rates of {counted(steps, 'step')} add up to {number(total)}: no weight moves further"
        return words, {"rate_sum": Measure(total, "1")}

    def _standing_still(self, run: Measured) -> str:
        """Name what else did not move."""
        entropy = levels(run, "entropy")
        is_same = entropy is not None and abs(entropy.change) < self.still * abs(entropy.first)
        return "; the entropy hardly changed" if is_same else ""

"""RDT004: the KL to the reference grew beyond what the reward bought, from the trainer's log alone."""

from typing import TYPE_CHECKING

from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, kl_coefficient, number, own_name
from rolloutdoctor.rules.measures.kl_passed import fell_back
from rolloutdoctor.rules.measures.reward_rise import may_have_risen, rose_by, rose_since
from rolloutdoctor.rules.numbers_rule import NumbersRule, at_most, from_to, go_back, levels, logged, series, step_at
from rolloutdoctor.rules.series import change_of_means, ends, memory
from rolloutdoctor.rules.shift import shift
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


class KlBlowUp(NumbersRule):
    """The KL from the reference rose above a nat per token, and the reward did not rise with it.

    ## What it does
    Compares the logged KL at the end with that at the start, and the reward beside it: the gold one where it is logged.

    ## Why it matters
    A policy with a KL of a nat per token is a different model, and what the reference could do is lost. Where the
    reward did not rise, the policy diverged.

    ## How it is measured
    `kl_last` is the median over the last tenth of the logged steps, at least three. A blow-up is a `kl_last` above 1
    nat and above ten times the smallest of the first three. It is information if the reward rose from the onset: by
    four standard errors in the medians of a few steps or, if it rose slowly, with a mean of the last third of the
    steps since then (at least six) above that of the first by two standard errors and above what was before. It stays a
    warning if all it rose is less than half of the standard deviation of the rewards at the start, if that is logged:
    another nat per token buys more than that. There is no finding if the reward may have risen but was logged in fewer
    than six of the steps. It is an error if the reward is lower at the end than at the start by as much, and else a
    warning. `onset` is the first step from which the KL stays above the geometric mean of both; for a rise over more
    than a quarter of the steps, the first that left the start. In a log of fewer than ten steps a KL that goes from
    below 0.01 to above 0.3 nats between the first two, one step apart, is a warning: one step does not move a policy
    that far. That is information if the KL falls back, if the reward of three lines or more is not below the first, or
    if it may have risen in lines that have no reward or are left out, which may be of other rows. It is information if
    running medians were above 1 nat in a tenth of the lines, and are not at the end. Confirmed: the log shows that it
    happened, not why. A KL that is NaN or negative is left to `RDM003`.

    ## What to do
    Go back to a checkpoint before the onset; raise the KL coefficient, or lower the learning rate.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT004", kl=[0.001 * 1.6**step for step in range(20)], reward=[0.5] * 20)
    'RDT004 warning confirmed: kl 1.007'
    """

    code = "RDT004"
    name = "kl-blow-up"
    references = ("https://github.com/volcengine/verl/issues/6280",)
    about = ("kl",)
    beside = ("reward", "gold_reward", "reward_std", "learning_rate")

    high: float = 1.0
    times: float = 10.0
    still: float = 0.01
    jump: float = 0.3
    moves: float = 2.0
    """Standard errors of a rise that excuses, as of a reward that moved (`RDT016`): to accuse would take more."""
    worth: float = 0.5
    """Standard deviations of the rewards at the start, below which a rise of the reward is next to nothing."""
    long: float = 0.1
    """Share of the lines in which a KL was above `high` that fell back."""
    third: int = 6
    """Steps of which two means are compared: fewer tell no standard error."""

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge the first two of few steps, one step apart, of which the first has no KL."""
        if len(run.table) < 2 or context.counted_steps or step_at(run, 1) != step_at(run, 0) + 1:
            return None
        before, after = (float(value) for value in series(run, "kl")[:2])
        if not 0 <= before <= self.still or after <= self.jump:
            return None
        onset = step_at(run, 1)
        rates = run.table["learning_rate"].drop_nulls()
        rate = f" at a learning rate of {number(rates[0])}" if len(rates) else ""
        rewards = run.table["reward"].drop_nulls().drop_nans()
        is_passing = run.table["kl"][-1] <= self.jump or (len(rewards) > 2 and rewards[-1] >= rewards[0])
        # Lines of the log that may be of other rows than those of the step are left out.
        is_hidden = not len(rewards) and "reward" in context.quantities
        is_passing |= is_hidden or may_have_risen(series(run, "reward"))
        return Judgement(
            severity=Severity.INFO if is_passing else Severity.WARNING,
            confirmed=True,
            headline=f"KL jumped {from_to(before, after)} nats in one step, at step {onset}",
            message=f"The KL to the reference went {from_to(before, after)} nats in one step{rate}.",
            evidence="the logged KL of two consecutive steps",
            advice=f"check {own_name(context, 'the learning rate')}{rate.replace(' at a learning rate', '')}, gradient "
            "clipping, and that both steps are of the same policy",
            measures={
                "kl_first": Measure(before, "nats"),
                "kl_last": Measure(after, "nats"),
                "onset": Measure(onset, "step"),
            },
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the start."""
        import numpy as np

        values = series(run, "kl")
        level = ends(values)
        start = max(float(values[:3].min()), 0.0)
        if level.last <= self.high:
            return fell_back(run, values, self.high, self.long, context) if start * self.times < self.high else None
        if level.last <= self.times * start:
            return None
        rise = shift(values, start, level.last, (max(start, 1e-3) * level.last) ** 0.5)
        onset = step_at(run, rise.at)
        # A reward that is no more than a proxy is cheaply bought.
        bought_of = "reward" if logged(run, "gold_reward") is None else "gold_reward"
        rewards, reward = logged(run, bought_of), levels(run, bought_of)
        # Trainers log the rewards of one of several updates on a batch.
        since = int(np.isfinite(series(run, bought_of)[: rise.at]).sum())
        is_risen = rewards is not None and (rose_since(rewards, since) or self._rises_on(rewards, since))
        if may_have_risen(series(run, bought_of)):
            return None
        spread = levels(run, "reward_std")
        if rewards is not None and spread is not None:
            is_risen = is_risen and rose_by(rewards) >= self.worth * spread.first
        fell = reward is not None and reward.errors > 4 and reward.change < 0
        bought = (
            ""
            if reward is None
            else f", while the {BY_NAME[bought_of].title} went {from_to(reward.first, reward.last)}"
        )
        how = rise.words("rose" if is_risen else "blew up", "rose", onset)
        headline = f"KL {how}: {from_to(start, level.last)} nats{at_most(values, level.last)}"
        return Judgement(
            severity=Severity.INFO if is_risen else Severity.ERROR if fell else Severity.WARNING,
            confirmed=True,
            headline=headline if is_risen or bought_of == "reward" else f"{headline}{bought}",
            remark=f"{headline}{bought}" if is_risen else "",
            message=(
                f"The KL to the reference {how}, {from_to(start, level.last)} nats{bought}. "
                f"Its maximum is {number(float(values.max()))}."
            ),
            evidence=f"the median over the last {counted(level.count, 'step')} of {len(values)}",
            advice=(
                f"{go_back(run, onset)}; raise {kl_coefficient(context)} or "
                f"lower {own_name(context, 'the learning rate')}"
            ),
            measures={
                "kl_first": Measure(start, "nats"),
                "kl_last": Measure(level.last, "nats"),
                "onset": Measure(onset, "step"),
            },
        )

    def _rises_on(self, rewards: "Values", onset: int) -> bool:
        """Tell whether the reward rises all the while, too slowly for the medians of few steps, above what it was."""
        before, since = rewards[: max(onset, 1)], rewards[onset:]
        third = len(since) // 3
        if third < self.third:
            return False
        change, error = change_of_means(since[:third], since[-third:], memory(rewards))
        earlier = float(before[-third:].mean())
        return change > self.moves * error and float(since[-third:].mean()) > earlier

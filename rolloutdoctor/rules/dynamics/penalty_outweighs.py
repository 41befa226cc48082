"""RDT022: the KL penalty in the reward outweighs the reward, from the trainer's log alone."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, kl_coefficient, logs_remedy, number
from rolloutdoctor.rules.logged_quantities import NO_SUCH_METRIC
from rolloutdoctor.rules.numbers_rule import NumbersRule, series
from rolloutdoctor.rules.table_rule import Measured


class PenaltyOutweighs(NumbersRule):
    """The KL penalty that is taken off the reward is larger than the rewards of a step differ.

    ## What it does
    Compares the logged reward with the logged reward less its KL penalty, which is what the advantages are made of.

    ## Why it matters
    A penalty larger than the differences between rewards decides which responses are reinforced: the policy is pulled
    to the reference, and the reward hardly counts, although its curve is the one that people watch.

    ## How it is measured
    `penalty` is the median over the logged steps of the reward less the penalised one, in absolute value. `spread` is
    the median of sqrt((largest - mean) (mean - smallest)) of the rewards, which no standard deviation of them exceeds.
    A finding is a penalty of `penalty_share` times the spread, 1 or more, in three steps or more: information, from 3
    on a warning. Confirmed: the log itself is the proof. In runs that train, the penalty is a twentieth of the spread
    or less. Rewards that are normalised before the penalty are on another scale and not compared.

    ## What to do
    Lower the coefficient of the KL in the reward, or bound the penalty; look at the KL and at whether the reference is
    the right one.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> ends = {"reward_min": [0.0] * 3, "reward_max": [1.0] * 3, "ppo_kl": [0.01] * 3}
    >>> diagnose_log("RDT022", "verl", reward=[0.5, 0.4, 0.6], penalised_reward=[-30.0, -31.0, -29.0], **ends)
    'RDT022 warning confirmed: reward 0.5'
    """

    code = "RDT022"
    name = "penalty-outweighs"
    references = ("https://github.com/volcengine/verl/issues/6806",)
    about = ("reward", "penalised_reward", "reward_min", "reward_max")

    fewest: int = 3
    least: float = 1.0
    far: float = 3.0
    """Times the spread: the penalties of two responses then differ by more than it if they differ by a third."""

    def inapplicable_reason(self, context: Context) -> str | None:
        """A log without a penalised reward: its trainer has the KL in the loss, or none."""
        return None if "penalised_reward" in context.quantities else NO_SUCH_METRIC

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without the rewards, or in which one metric stands for both."""
        quantities, missing = context.quantities, super().unavailable_reason(context)
        if missing is not None or quantities["reward"][0] != quantities["penalised_reward"][0]:
            return missing
        return Missing("the log has no reward before the KL penalty", logs_remedy())

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps; one reward in all of them, which any penalty outweighs."""
        few = super().inconclusive_reason(run, context)
        if few is not None or self._spread(run) > 0:
            return few
        return Missing("the rewards do not differ", "look at the reward function")

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the penalty with the spread."""
        import numpy as np

        penalty = float(np.median(np.abs(series(run, "reward") - series(run, "penalised_reward"))))
        spread = self._spread(run)
        if not spread or penalty < self.least * spread:
            return None
        times = penalty / spread
        words = (
            f"the KL penalty takes {number(penalty)} off the reward, {times:.3g} times the spread of the rewards "
            f"({number(spread)})"
        )
        return Judgement(
            severity=Severity.WARNING if times >= self.far else Severity.INFO,
            confirmed=True,
            headline=f"{words}: the policy is trained more on the KL than on the reward",
            message=f"In the median of {counted(len(run.table), 'logged step')} {words}.",
            evidence="the logged reward before and after the KL penalty",
            advice=f"lower {kl_coefficient(context, in_reward=True)}, and check that the reference is the right model",
            measures={
                "penalty": Measure(penalty, "reward"),
                "spread": Measure(spread, "reward"),
                "penalty_share": Measure(times, "1"),
            },
            remark=words,
            hinders=True,
        )

    def _spread(self, run: Measured) -> float:
        """Return by how much the rewards of a step differ at most; 0 where they do not."""
        import numpy as np

        mean, high, low = (series(run, name) for name in ("reward", "reward_max", "reward_min"))
        return float(np.median(np.sqrt((high - mean).clip(0) * (mean - low).clip(0)))) if len(mean) else 0.0

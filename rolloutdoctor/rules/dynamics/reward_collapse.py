"""RDT005: the reward rose and fell, or never rose, from the trainer's log alone."""

from dataclasses import dataclass

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.numbers_rule import NumbersRule, series, step_at
from rolloutdoctor.rules.series import OF_A_MEDIAN, ends, shift, smoothed
from rolloutdoctor.rules.table_rule import Measured


@dataclass(frozen=True)
class RewardCollapse(NumbersRule):
    """The reward fell from its best level by more than noise explains.

    ## What it does
    Compares the logged reward at the end with its best running median.

    ## Why it matters
    A reward that falls although it is being optimised has an earlier cause: entropy or KL changed first, the sampler
    serves another policy, the verifier died, or the data changed.

    ## How it is measured
    `reward_best` is the largest running median over a tenth of the logged steps, `reward_last` the median of the last
    tenth. A collapse is a fall by more than half of the range of these medians and by more than six standard errors, of
    the medians and also of the means of the same steps, since medians of few responses jump. The noise is estimated
    from the differences of neighbouring steps and of every other step, since it may be correlated. Four standard errors
    are enough where three quarters of the way from the best level to the smallest reward of any response are lost.
    `onset` is the first step after the best from which on the running median stays below the middle of the two. An
    error where it ends at or below the level of its start. Confirmed.

    ## What to do
    Look at what else changed at the onset: entropy, KL, truncated share, gradient norm and sampler gap of the same log.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> rises = [0.1 + 0.05 * step + 0.01 * (step % 2) for step in range(15)]
    >>> diagnose_log("RDT005", reward=rises + [0.02 + 0.01 * (step % 2) for step in range(15)])
    'RDT005 error confirmed: reward 0.2397'
    """

    code = "RDT005"
    name = "reward-collapse"
    references = ("https://github.com/volcengine/verl/issues/6806",)
    about = ("reward",)
    beside = ("reward_min",)

    fewest: int = 20
    errors: float = 6.0
    errors_of_most: float = 4.0
    most: float = 0.75
    fraction: float = 0.5

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps of the lowest reward."""
        return table.with_columns(value=pl.col("reward").max() - pl.col("reward"))

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the best."""
        import numpy as np

        values = series(run, "reward")
        level = ends(values)
        medians = smoothed(values, 2 * (level.count // 2) + 1)
        top = int(np.argmax(medians))
        best, lowest = float(medians[top]), float(medians.min())
        at_best = values[max(0, top - level.count // 2) : top + level.count // 2 + 1]
        fall = best - level.last
        sure = min(fall, OF_A_MEDIAN * float(at_best.mean() - values[-level.count :].mean()))
        error = level.error_with_memory
        needed = self.errors_of_most if self._lost_most(run, best, level.last) else self.errors
        if sure <= needed * error or fall <= self.fraction * (best - lowest) or top > len(values) - level.count:
            return None
        drop = shift(values[top:], best, level.last, (best + level.last) / 2, level.noise)
        onset = step_at(run, top + drop.at)
        what = drop.words("collapsed", "fell", onset)
        return Judgement(
            severity=Severity.ERROR if level.last <= max(lowest, level.first) else Severity.WARNING,
            confirmed=True,
            headline=f"reward {what}: from {number(best)} to {number(level.last)}",
            message=f"The reward {what}, from {number(best)} (step {step_at(run, top)}) to {number(level.last)}.",
            evidence=f"{number(sure / error) if error else 'many'} standard errors over {counted(level.count, 'step')}",
            advice=(
                "compare entropy, KL, truncated share, gradient norm and train-inference mismatch before and after "
                f"step {onset}: the first to change is the likely cause"
            ),
            measures={
                "reward_best": Measure(best, "reward"),
                "reward_last": Measure(level.last, "reward"),
                "onset": Measure(onset, "step"),
            },
        )

    def _lost_most(self, run: Measured, best: float, last: float) -> bool:
        """Tell whether most of what was to lose is lost: of the best level above the least reward that was logged."""
        import numpy as np

        floors = series(run, "reward_min")
        floors = floors[np.isfinite(floors)]
        return len(floors) > 0 and best - last > self.most * (best - float(floors.min())) > 0

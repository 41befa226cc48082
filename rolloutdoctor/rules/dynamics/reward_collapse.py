"""RDT005: the reward rose and fell, or never rose, and so the accuracy, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.chance_cluster import is_chance_cluster, is_spike
from rolloutdoctor.rules.logged_quantities import by_step, not_logged
from rolloutdoctor.rules.measures.accuracy_fall import lost_at_once, lost_since_start
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, series, shown, step_at, where_logged
from rolloutdoctor.rules.series import (
    OF_A_MEDIAN,
    ends,
    error_of_answers,
    fall_from_best_fifth,
    leaves,
    smoothed,
)
from rolloutdoctor.rules.shift import shift
from rolloutdoctor.rules.table_rule import Measured


class RewardCollapse(NumbersRule):
    """The reward, or the accuracy, fell from its best level by more than noise explains.

    ## What it does
    Compares the logged reward, and a logged accuracy, at the end with its best running median.

    ## Why it matters
    The trainer maximises the reward (less any KL penalty in it), so a fall has a cause before it: entropy or KL
    changed first, the penalty outweighs the reward (`RDT022`), the sampler serves another policy, the verifier died,
    the data changed. Where a held-out accuracy falls and the reward does not, the reward measures something else.

    ## How it is measured
    `reward_best` is the largest running median over a tenth of the logged steps, 20 or more, before the last tenth;
    `reward_last` is the median of that. A collapse is a fall by more than half of the range of these medians and by
    more than six standard errors, as is 1.25 times that of the means of the same steps: medians of few responses jump.
    The noise is that of differences of neighbouring steps and of every other step: it may be correlated; of means of
    few answers, whose differences are multiples of 1 / N, the median is taken between them. It is that from the best
    level on where that is larger. A level is a tenth of the medians above the middle of both, unless the run started
    with it: fewer are a spike. Four errors are enough if three quarters of the way from the best level to the smallest
    reward of any response are lost, and five between the means of the best and the last fifth of 100 steps or more if
    half of their range is and, where the end is above the first fifth, half of the gain by two (both are then these
    means). Where most neighbouring steps have one reward, as of one that is 0 but in a few, chance may put so many
    together in one run in 1,000 at most. `onset` is the step after the best from which on the values lie below the
    middle, the likeliest one; of a steady fall the first that left the best. It is an error if the reward ends at or
    below the level of its start. Confirmed.

    Six values of an accuracy are enough if it loses half of its best level by six standard errors or three quarters by
    four, or if the last value alone loses three quarters by six. It is information if it ends a quarter and six
    standard errors below the first that was logged, or fell steadily (a rank correlation with time beyond three
    standard errors), with no value of the last third above the middle. An accuracy is a share of right answers, with at
    least the noise of as many answers as its values show. That of evaluations is preferred to that of the training.

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
    beside = ("reward_min", "accuracy")

    fewest: int = 20
    fewest_evaluations: int = 6
    errors: float = 6.0
    errors_of_most: float = 4.0
    long: int = 100
    errors_of_fifths: float = 5.0
    errors_of_loss: float = 2.0
    most: float = 0.75
    fraction: float = 0.5
    quarter: float = 0.25
    steady: float = 3.0

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without a reward and an accuracy."""
        return None if context.quantities.keys() & {"reward", "accuracy"} else not_logged(context, "reward")

    def watched(self, context: Context) -> tuple[str, ...]:
        """The reward, and the accuracy where that is logged alone."""
        return self.about if "reward" in context.quantities else ("accuracy",)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with a reward or an accuracy."""
        wide = by_step(run, context, (*self.about, *self.beside))
        return wide.filter(pl.any_horizontal(pl.col("reward", "accuracy").is_finite())).sort("step")

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps of the lowest reward, or accuracy."""
        value = pl.coalesce(pl.col("reward").max() - pl.col("reward"), pl.col("accuracy").max() - pl.col("accuracy"))
        return table.with_columns(value=value)

    def note(self, place: Mapping[str, Any]) -> str:
        """What the step logged of both."""
        return ", ".join(shown(place, name) for name in ("reward", "accuracy") if place[name] is not None)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps with either."""
        if len(where_logged(run, "accuracy").table) >= self.fewest_evaluations:
            return None
        return super().inconclusive_reason(where_logged(run, "reward"), context)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the best: of the reward, else of the accuracy."""
        rewards, accuracies = where_logged(run, "reward"), where_logged(run, "accuracy")
        judgement = self.judge_log(rewards, context) if len(rewards.table) >= self.fewest else None
        if judgement is not None or len(accuracies.table) < self.fewest_evaluations:
            return judgement
        fall = self._fall(accuracies, "accuracy") or lost_at_once(accuracies, self.errors, self.most)
        return fall or lost_since_start(accuracies, self.errors, self.quarter, self.steady)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Compare the end with the best."""
        return self._fall(run, "reward")

    def _fall(self, run: Measured, name: str) -> Judgement | None:
        values = series(run, name)
        level = ends(values)
        medians = smoothed(values, 2 * (level.count // 2) + 1)
        top = int(medians.argmax())
        best, lowest = float(medians[top]), float(medians.min())
        since = max(0, top - level.count // 2)
        at_best = values[since : top + level.count // 2 + 1]
        fall, middle = best - level.last, (best + level.last) / 2
        sure = min(fall, OF_A_MEDIAN * float(at_best.mean() - values[-level.count :].mean()))
        error, least = level.or_noise_of(values[since:]).error_with_memory, self.fraction * (best - lowest)
        lost_most = self._lost_most(run, best, level.last)
        if name == "accuracy":
            error, least = max(error, error_of_answers(values, best, level.count)), self.fraction * best
            lost_most = fall > self.most * best
        needed = self.errors_of_most if lost_most else self.errors
        is_sure = sure > needed * error and fall > least
        is_long = name == "reward" and len(values) >= self.long and not is_sure
        numbers = {"errors": self.errors_of_fifths, "share": self.fraction, "beyond": self.errors_of_loss}
        slow = fall_from_best_fifth(values, **numbers) if is_long else None
        is_none = is_spike(medians, middle, level.count) or is_chance_cluster(values, medians, middle)
        if not (is_sure or slow) or top > len(values) - level.count or is_none:
            return None
        best, last = slow or (best, level.last)
        # Of noisy values single ones cross the middle long after the fall.
        drop = shift(medians[top:], best, last, (best + last) / 2, level.noise, values[top:])
        drop = drop if drop.is_steady else replace(drop, at=leaves(values[top:], best, last))
        onset = step_at(run, top + drop.at)
        change_words = drop.words("collapsed", "fell", onset)
        return Judgement(
            severity=Severity.ERROR if last <= max(lowest, level.first) else Severity.WARNING,
            confirmed=True,
            headline=f"{name} {change_words}: {from_to(best, last)}",
            message=f"The {name} {change_words}, from {number(best)} (step {step_at(run, top)}) to {number(last)}.",
            evidence=f"more than {self.errors_of_fifths:g} standard errors between means of a fifth of the steps"
            if slow
            else f"{number(sure / error) if error else 'many'} standard errors over {counted(level.count, 'step')}",
            advice=(
                "compare entropy, KL, truncated share, gradient norm and train-inference mismatch before and after "
                f"step {onset}: the first to change is the likely cause"
            ),
            measures={
                f"{name}_best": Measure(best, "reward" if name == "reward" else "1"),
                f"{name}_last": Measure(last, "reward" if name == "reward" else "1"),
                "onset": Measure(onset, "step"),
            },
        )

    def _lost_most(self, run: Measured, best: float, last: float) -> bool:
        """Tell whether most of what was to lose is lost: of the best level above the least reward that was logged."""
        floors = series(where_logged(run, "reward_min"), "reward_min")
        return len(floors) > 0 and best - last > self.most * (best - float(floors.min())) > 0

"""RDA024: advantages that are the rewards themselves, from the trainer's log alone."""

from collections.abc import Mapping

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import names_of
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import LONGER_LOG, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, own_name
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table_rule import Measured, Quantity


class NoBaselineLogged(NumbersRule):
    """The smallest and the largest advantage of every logged step are those of the rewards: no baseline was subtracted.

    ## What it does
    Compares the extremes of the logged advantages with those of the rewards. No rollouts are needed.

    ## Why it matters
    A group-relative estimator compares the responses to one prompt. With one response per prompt there is nothing to
    compare with, and trainers take the score itself as the advantage without a word (verl's GRPO, RLOO and OPO have a
    mean of 0 and a deviation of 1 for such a group). With rewards of 0 and more every response is reinforced, good or
    bad; with penalties alone every one is suppressed; and the variance of the gradient is that of no baseline.

    ## How it is measured
    `steps` are those with different rewards. A finding requires that in all of them, at least three, both extremes of
    the advantages equal those of the rewards to within 1e-5 of their size, and that a baseline within groups cannot
    produce that: in `one_sided_steps` no reward, and so no advantage, is below 0 (or none above), although a group with
    a baseline has both signs; or three steps have different pairs of extremes, each of two sizes. Where the log has
    rewards less a KL penalty, those are used. Confirmed. Clean if the mean advantage is less than half of the mean
    reward, since a KL penalty within the reward moves both extremes.

    ## What to do
    Sample several responses for each prompt, and see that the id of the prompt is given before the batch is repeated:
    an id for each row makes groups of one, too. Or choose an estimator that needs no group.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> rewards = {"reward_min": [0.0, 0.1, 0.0], "reward_max": [1.0, 0.9, 0.8]}
    >>> diagnose_log("RDA024", **rewards, advantage_min=[0.0, 0.1, 0.0], advantage_max=[1.0, 0.9, 0.8])
    'RDA024 warning confirmed: steps 3'
    >>> diagnose_log("RDA024", **rewards, advantage_min=[-0.7] * 3, advantage_max=[0.7] * 3, advantage=[0.0] * 3,
    ...              reward=[0.5] * 3)
    'RDA024 clean'
    """

    code = "RDA024"
    name = "no-baseline-logged"
    references = ("https://arxiv.org/abs/2402.03300",)
    part_names = (Part.GROUP_BASELINE,)
    about = ("advantage_min", "advantage_max", "reward_min", "reward_max")
    beside = ("advantage", "reward", "penalised_reward_min", "penalised_reward_max")

    fewest: int = 3
    within: float = 1e-5
    centred: float = 0.5

    def inapplicable_reason(self, context: Context) -> str | None:
        """Rollouts, which say it themselves, or a trainer that logs no extremes."""
        if context.has_rows:
            return "tests logs without rollouts"
        writers = context.likely_writers
        is_logged = not writers or any(all(names_of(writer, name) for name in self.about) for writer in writers)
        return None if is_logged else "the trainer does not log the smallest and the largest advantage"

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with rewards of several values; `same` where the advantages have their extremes."""
        # With a KL penalty within the reward, the advantages are those of the reward less it.
        ends = {f"reward_{end}": pl.coalesce(f"penalised_reward_{end}", f"reward_{end}") for end in ("min", "max")}
        size = pl.max_horizontal(pl.col("reward_min").abs(), pl.col("reward_max").abs())
        away = pl.max_horizontal(
            *((pl.col(f"advantage_{end}") - pl.col(f"reward_{end}")).abs() for end in ("min", "max"))
        )
        return (
            super()
            .table(run, context)
            .with_columns(**ends)
            .filter(pl.col("reward_max") > pl.col("reward_min"))
            .with_columns(
                same=away <= self.within * size,
                one_sided=(pl.col("reward_min") >= 0) | (pl.col("reward_max") <= 0),
                two_sizes=(pl.col("reward_min") + pl.col("reward_max")).abs() > self.within * size,
            )
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Counts of steps, and the means of what is compared."""
        same = pl.col("same")
        means = {name: (pl.col(name).mean(), BY_NAME[name].unit) for name in (*self.about, *self.beside)}
        extremes = pl.struct("reward_min", "reward_max").filter(same & pl.col("two_sizes"))
        return {
            "steps": (pl.len(), "steps"),
            "same_steps": (same.sum(), "steps"),
            "one_sided_steps": ((same & pl.col("one_sided")).sum(), "steps"),
            "other_extremes": (extremes.n_unique(), "steps"),
            **means,
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps with rewards of several values."""
        if len(run.table) >= self.fewest:
            return None
        return Missing(
            f"needs {self.fewest} steps with rewards of several values; the log has {len(run.table)}", LONGER_LOG
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, where no baseline within groups gives these extremes."""
        is_told = run.count("one_sided_steps") or run.count("other_extremes") >= self.fewest
        if run.count("same_steps") < len(run.table) or not is_told:
            return None
        steps = counted(len(run.table), "logged step")
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"the advantages are the rewards themselves in all {steps} in which rewards differ: no baseline "
            "is subtracted, as in groups of one response",
            message=f"in all {steps} with rewards of several values the smallest and the largest advantage are those "
            "of the rewards",
            evidence=f"{run.count('one_sided_steps'):,} of these steps have advantages of one sign, which a baseline "
            "within groups cannot give",
            advice=f"sample several responses for each prompt: raise {own_name(context, 'the group size')}, and give "
            "the id of a prompt before its row is repeated",
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Advantages that are neither the rewards nor around 0, as with a KL penalty within the reward."""
        mean, reward = run["advantage"], run["reward"]
        if mean is not None and reward is not None and abs(mean) < self.centred * abs(reward):
            return None
        return Missing("the mean advantage is not logged, or not near 0", "log the means of rewards and advantages")

"""RDT002: the reward, or what one reward function gives, never changes, from the trainer's log alone."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number
from rolloutdoctor.rules.logged_quantities import is_rounded, of_distillation
from rolloutdoctor.rules.measures.all_zero import advantages_differ, all_zero
from rolloutdoctor.rules.measures.constant_functions import SOLVED, constant_functions, functions_of, zero_functions
from rolloutdoctor.rules.measures.reward_floor import mostly_least
from rolloutdoctor.rules.numbers_rule import NumbersRule, logged, series, step_at
from rolloutdoctor.rules.table_rule import Measured


class ConstantReward(NumbersRule):
    """The mean reward, or that of one reward function, is the same number in every logged step.

    ## What it does
    Compares the logged rewards of all steps with each other, and those of each reward function.

    ## Why it matters
    A mean over sampled responses varies unless the reward function returns a constant. Such a
    function crashed and fell back, compares with an empty answer, or parses no response.

    ## How it is measured
    One value of the reward in ten or more logged steps is an error if the standard deviation of the rewards is
    logged as 0, every group is zero-variance, the smallest reward is the largest, or no step has a gradient, and is
    confirmed then, and a warning where advantages differ in half of the steps, as by a KL penalty; else a warning:
    batches have equal means if a reward is standardized before it is logged. The least reward in 90 % of the steps
    is information. In fewer than ten lines, a reward that is exactly 0 in all of them is a warning if the mean
    advantage or return is 0 too, or the spread is 0, which in three lines or more is an error; functions whose mean
    and deviation are exactly 0 in all of them are a warning in three lines or more, and information in fewer, as
    are those with a mean of 0 in two lines or more.

    For a single reward function, a value that holds to the end, for ten steps and half of the log, and not by chance,
    is a warning if it is 0 or less from the first step, or below what the function gave before. It is information if it
    is 1, above what it gave before, or above 0 from the first step: every response passes. So is 0 of a penalty, by its
    name, that nothing incurred, and 0 if the options give a function no weight. Of rollouts RDA009 measures them.

    ## What to do
    Call the reward function on some responses of the log, and look at what it returns and which exceptions it catches.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT002", reward=[0.0] * 12, reward_std=[0.0] * 12)
    'RDT002 error confirmed: reward 0'
    """

    code = "RDT002"
    name = "constant-reward"
    references = ("https://github.com/huggingface/trl/issues/2703",)
    about = ("reward",)
    beside = (
        *("reward_std", "zero_variance_share", "reward_min", "reward_max", "advantage", "return", "grad_norm"),
        *("advantage_min", "advantage_max"),
    )

    lasting: int = 3
    coarse: float = 1e-3
    coarse_spread: float = 1e-5
    """Unit of a deviation that is printed as 0: what is smaller is far below the 1e-4 that is added to it."""
    mostly: float = 0.9

    def inapplicable_reason(self, context: Context) -> str | None:
        """A training without a reward."""
        return of_distillation(context)

    def metrics(self, context: Context) -> frozenset[str]:
        """Also those of each function."""
        return super().metrics(context).union(*(filter(None, metrics) for metrics in functions_of(context).values()))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """With a column for each metric of a function."""
        names = {name for metrics in functions_of(context).values() for name in metrics if name is not None}
        table = super().table(run, context)
        return table.join(run.by_step(*names), on=STEP_KEY, how="left", maintain_order="left") if names else table

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Every step."""
        return table.with_columns(value=pl.lit(1.0))

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge few lines in which all is 0."""
        return all_zero(run, context, self.lasting) or self._zero_functions(run, context)

    def _zero_functions(self, run: Measured, context: Context) -> Judgement | None:
        """Name the functions that gave 0 to every response of few lines."""
        table = run.table
        names, is_zero = zero_functions(table, context, self.coarse, self.coarse_spread)
        if not names:
            return None
        where = f"step {step_at(run, 0)}" if len(table) == 1 else f"all {len(table):,} logged steps"
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")
        gave = "gave 0 to every response of" if is_zero else f"{'has' if len(names) == 1 else 'have'} a mean of 0 in"
        return Judgement(
            severity=Severity.WARNING if is_zero and len(table) >= self.lasting else Severity.INFO,
            confirmed=True,
            headline=f"{counted(len(names), 'reward function')} {gave} {where}: {listed}",
            message=f"{'Mean and std' if is_zero else 'The mean'} of {', '.join(names)} "
            f"{'are' if is_zero else 'is'} exactly 0 in {where}.",
            evidence=f"the logged means{' and standard deviations' if is_zero else ''} of the functions",
            advice=f"call {names[0]} on some responses: check what it returns and which exceptions it swallows",
            measures={"constant_functions": Measure(len(names), "functions")},
            hinders=True,
        )

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """One value of the reward, or of a function."""
        import numpy as np

        rewards = series(run, "reward")
        if np.ptp(rewards) > 0:
            return self._of_functions(run, context) or mostly_least(run, context, self.mostly)
        flat, value, differ = self._flat(run, context), number(float(rewards[0])), advantages_differ(run)
        words = f", {differ}" if differ else ": nothing is learned" * bool(flat)
        return Judgement(
            severity=Severity.ERROR if flat and not differ else Severity.WARNING,
            confirmed=bool(flat),
            headline=f"the reward is {value} in all {len(rewards):,} logged steps{words}",
            message=f"The reward is {value} in {counted(len(rewards), 'logged step')}"
            f"{f', {differ}' if differ else flat and f': {flat}'}.",
            evidence="the logged rewards, their spread and the gradient norm" if flat else "the logged rewards",
            advice=_advice(float(rewards[0])),
            measures={"onset": Measure(step_at(run, 0), "step")},
        )

    def _flat(self, run: Measured, context: Context) -> str:
        """Say why nothing is learned from a reward that never changes; empty where nothing shows it."""
        spread, share, norm = (logged(run, name) for name in ("reward_std", "zero_variance_share", "grad_norm"))
        equal = spread is not None and not spread.any() and not is_rounded(context, "reward_std", self.coarse_spread)
        extremes = (run.table["reward_min"] == run.table["reward_max"]).fill_null(value=False)
        if equal or (share is not None and share.min() == 1) or extremes.all():
            return "the rewards of every group are equal, so every advantage is 0"
        still = norm is not None and not norm.any() and not is_rounded(context, "grad_norm", self.coarse)
        return "the gradient norm is 0 in every step" if still else ""

    def _of_functions(self, run: Measured, context: Context) -> Judgement | None:
        """Judge the functions of a reward that changes."""
        constant = sorted(
            constant_functions(run.table, context, self.fewest, self.coarse_spread),
            key=lambda term: (term.solved, term.since, term.name),
        )
        if not constant:
            return None
        first, same = constant[0], [function for function in constant if function.solved == constant[0].solved]
        words = "; ".join(function.words for function in same)
        return Judgement(
            severity=Severity.INFO if first.solved else Severity.WARNING,
            confirmed=first.proved,
            headline=f"reward function {first.words}"
            + (f"; also constant: {counted(len(same) - 1, 'more function')}" if len(same) > 1 else ""),
            message=f"{words}: a constant reward adds nothing to any advantage.",
            evidence="the logged standard deviation over the responses is 0" if first.proved else "the logged means",
            advice="keep or drop it: every response passes; only a reward that varies between responses adds a signal"
            if first.solved
            else (
                f"call {first.name} on responses of step {first.since}: check what it returns and which exceptions it "
                "swallows"
            ),
            measures={"onset": Measure(first.since, "step"), "constant_functions": Measure(len(same), "functions")},
        )


def _advice(value: float) -> str:
    if value == SOLVED:
        return f"read some responses: if {number(value)} is right for them, use harder prompts; else check the function"
    return "run the reward function on some responses: check what it returns and which exceptions it swallows"

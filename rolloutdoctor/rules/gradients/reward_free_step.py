"""RDG003: steps whose whole gradient is free of reward, from the trainer's log alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import FEW_LINES, Context, Judgement, Missing, counted, logged_lines, number, percent
from rolloutdoctor.rules.logged_quantities import (
    SPREAD,
    by_step,
    is_reward_free,
    metrics_of,
    not_logged,
    of_distillation,
    tells_spread,
)
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

_READ = (*SPREAD, "grad_norm", "loss", "kl", "reward_min", "reward_max")
"""Quantities that the rule reads."""


_SAME_TEXT = (
    "check that each prompt gets several different samples (a temperature above 0, more than one response per prompt); "
)


class RewardFreeStep(TableRule):
    """Steps with zero reward variance in every group that still updated the weights.

    ## What it does
    Finds the steps at which the trainer logged zero reward variance in every group, and shows the gradient norm
    that it logged for them. No rollouts are needed.

    ## Why it matters
    With zero reward variance every advantage is 0, and so is the policy gradient. The update of such a step comes from
    the KL term, an entropy bonus or an auxiliary loss alone. Many such steps mean that the weights drift under terms
    without any task signal.

    ## How it is measured
    A step counts if the logged share of zero-variance groups is exactly 1 (a mean over groups or steps is 1 only if
    each of them is), if the smallest and the largest advantage are both 0, or if the standard deviation of the rewards
    is exactly 0. TRL means a standard deviation below 1e-8, which leaves advantages of at most 1e-4 times the root of
    the group size. A line with a deviation above 0 counts as another step, though some of its groups may have equal
    rewards. It is a warning if more than half of the steps are of this kind and moved the weights; fewer are the KL
    term working as intended, and information. TRL's gradient norm is that of the last step of a line. `grad_norm` is
    the mean of the norms over these steps, before clipping and over parameters; `grad_norm_ratio` is that mean divided
    by the mean over the other steps. `loss_by_kl` is the logged loss divided by the logged KL: at these steps the loss
    is beta times the KL, so the quotient is beta if both are averaged over tokens in the same way (`loss_by_kl_low` and
    `_high` are its extremes). `between_steps` counts those in which the log has different rewards, so rewards differ
    between prompts and never within one: if most steps are so, the responses to a prompt may be one text. With
    `logging_steps` above 1 a line is a window of several steps. Confirmed: the trainer logged it.

    ## What to do
    See how many steps there are and how large their gradient norm is. `diff --fix zero-std` on recorded rollouts shows
    the update without the KL of such groups; dynamic sampling (DAPO) avoids these steps.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> logged = {"frac_reward_zero_std": 1.0, "grad_norm": 0.00132, "loss": 9.192e-06, "kl": 2.298e-04}
    >>> diagnose_one("RDG003", toy_batch([[1, 1]]), trainer="trl", logged=logged)
    'RDG003 warning confirmed: steps_share 1'
    """

    code = "RDG003"
    name = "reward-free-step"
    references = (
        "https://github.com/huggingface/trl/issues/5588",
        "https://github.com/huggingface/trl/issues/2703",
    )
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    warn_above: float = 0.5

    def metrics(self, context: Context) -> frozenset[str]:
        """The gradient norm, what tells whether rewards differ, and the loss and its KL."""
        return metrics_of(context, _READ)

    def watched(self, context: Context) -> tuple[str, ...]:
        """The gradient norm, and what tells whether rewards differ."""
        return ("grad_norm", *SPREAD)

    def inapplicable_reason(self, context: Context) -> str | None:
        """A training without a reward."""
        return of_distillation(context)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log that does not say which steps had reward variance."""
        missing = () if tells_spread(context) else ("zero_variance_share",)
        needed = (*missing, "grad_norm")
        return None if context.quantities.keys() >= {*needed} else not_logged(context, *needed)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step of which the log tells."""
        is_whole = pl.col("free") & (pl.col("kl") > 0) & pl.col("loss").is_finite()
        return (
            by_step(run, context, _READ)
            .with_columns(free=is_reward_free(context), norm="grad_norm")
            .with_columns(between=pl.col("free") & (pl.col("reward_max") > pl.col("reward_min")))
            .filter(pl.col("norm") >= 0, pl.any_horizontal(pl.col(name).is_not_null() for name in SPREAD))
            .select(
                *STEP_KEY,
                "free",
                "norm",
                "between",
                *(pl.when(is_whole).then(name).alias(name) for name in ("loss", "kl")),
            )
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Shares of steps, and means over them."""
        free, norm, by_kl = pl.col("free"), pl.col("norm"), pl.col("loss") / pl.col("kl")
        return {
            "steps_share": (free.fill_null(value=False).mean(), "share"),
            "reward_free_steps": (free.sum(), "steps"),
            "between_steps": (pl.col("between").fill_null(value=False).sum(), "steps"),
            "dead_steps": ((norm.filter("free") == 0).sum(), "steps"),
            "grad_norm": (norm.filter("free").mean(), "parameter norm"),
            "grad_norm_others": (norm.filter(~free).mean(), "parameter norm"),
            "grad_norm_ratio": (norm.filter("free").mean() / norm.filter(~free).mean(), "1"),
            "loss_by_kl": (pl.sum("loss") / pl.sum("kl"), "1"),
            "loss_by_kl_low": (by_kl.min(), "1"),
            "loss_by_kl_high": (by_kl.max(), "1"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps that moved the model most."""
        return table.filter("free").with_columns(value="norm")

    def note(self, place: Mapping[str, Any]) -> str:
        """The gradient norm."""
        return f"logged gradient norm {place['norm']:.3g}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No line with both."""
        if run.table["free"].count():
            return None
        return Missing(
            "no logged step with a gradient norm proves that rewards differ within groups, or that none do",
            "record the rollouts",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information with a magnitude; a warning where most steps are such."""
        free, share, steps = run.count("reward_free_steps"), run["steps_share"], run.table["step"]
        if not free:
            return None
        moved = free - run.count("dead_steps")
        lines = logged_lines(len(steps), steps.to_list(), each_step=context.logs_each_step)
        message = f"every group was zero-variance in {percent(share)} of {lines}; " + (
            f"{moved:,} of them updated the weights (mean logged gradient norm {number(run['grad_norm'])})"
            if moved
            else "none of them updated the weights: the logged gradient norm is 0"
        )
        if moved and run["grad_norm_ratio"] is not None:
            message += f", {number(run['grad_norm_ratio'])} times that of the other steps"
        is_between = free == run.count("between_steps") and (share or 0.0) > self.warn_above
        evidence = "what the log says of the groups' rewards or advantages, and the logged gradient norm"
        with_kl = run.table["kl"].count()
        if with_kl:
            evidence += (
                f"; the logged loss is {number(run['loss_by_kl_low'])} to {number(run['loss_by_kl_high'])} times the "
                f"logged KL in {counted(with_kl, 'such step')}"
            )
        return Judgement(
            severity=Severity.WARNING if (share or 0.0) > self.warn_above and moved else Severity.INFO,
            confirmed=True,
            headline=_headline(run.table.filter("free")["step"].to_list(), moved, lines, is_between=is_between),
            message=message,
            evidence=evidence,
            advice=(_SAME_TEXT if is_between else "")
            + (
                "only the KL, entropy or auxiliary loss moved the weights: use dynamic sampling (DAPO), which drops "
                "zero-variance groups; with recorded rollouts `rolloutdoctor diff --fix zero-std` shows the effect"
                if moved
                else "use prompts that are neither too easy nor too hard, larger groups, or dynamic sampling (DAPO)"
            ),
        )


def _headline(free: Sequence[int], moved: int, lines: str, *, is_between: bool) -> str:
    """Say in which steps every group had equal rewards, and how many of them updated the weights.

    >>> _headline([80, 83], 2, "2 steps", is_between=False)
    'in steps 80 and 83 every group had equal rewards; both still updated the weights'
    >>> _headline([7], 0, "9 steps", is_between=False)
    'in step 7 (1 of 9 steps) every group had equal rewards; it did not update the weights'
    """
    count, is_all = len(free), lines.startswith(f"{len(free):,} ")
    where = f"in all {lines}" if is_all else f"in {count:,} of {lines}"
    if count <= FEW_LINES and "window" not in lines:
        where = f"in step{'s' if count > 1 else ''} {' and '.join(map(str, free))}"
        where += "" if is_all else f" ({count} of {lines})"
    equal = "every group had equal rewards" + (", though rewards differ between prompts" if is_between else "")
    if count == 1:
        return f"{where} {equal}; it {'still updated' if moved else 'did not update'} the weights"
    of = {0: "none of them", count: "both" if count == 2 else "all of them"}
    who = of.get(moved, f"{moved:,} of them")
    return f"{where} {equal}; {who} {'still ' if moved else ''}updated the weights"

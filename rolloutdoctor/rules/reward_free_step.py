"""RDG003: steps whose whole gradient is free of reward, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logged_lines, logs_remedy, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from rolloutdoctor.rules.logged_step import LoggedStep


@dataclass(frozen=True)
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
    A TRL step counts if the logged `frac_reward_zero_std` is exactly 1: a mean over groups, or over several steps, is 1
    only if each of them is, and the logged `grad_norm` is that of the last. TRL means a standard deviation below 1e-8,
    which leaves advantages of at most 1e-4 times the root of the group size. A verl step counts if
    `critic/advantages/max` and `/min`, over all trained tokens, are both 0. `grad_norm` is the mean of the logged norms
    over these steps, before clipping and over parameters; `grad_norm_ratio` is that mean divided by the mean over the
    other steps. `loss_by_kl` is the logged loss divided by the logged KL: at these steps the loss is beta times the KL,
    so the quotient is beta if both are averaged over tokens in the same way (`loss_by_kl_low` and `_high` are its
    extremes). With `logging_steps` above 1 the lines are windows of several steps.
    Confirmed: it is what the trainer logged.

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

    warn_above: float = 0.1

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log that does not say which steps had reward variance."""
        trainer = context.writer
        tells = trainer is not None and trainer.log.reward_free(dict.fromkeys(context.metrics, 0.0)) is not None
        return None if tells and trainer and trainer.log.grad_norm in context.metrics else self._not_logged(context)

    def _not_logged(self, context: Context) -> Missing:
        return Missing(
            "no step logs both a gradient norm and the share of zero-variance groups",
            context.recording.get("reward_free", logs_remedy()),
        )

    def measure_log(self, step: "LoggedStep") -> Mapping[str, float | None]:
        """Read from the log whether every group of a step lacked reward variance, and the gradient norm."""
        logged, trainer = step.logged, step.writer
        free = None if trainer is None or not step.training else trainer.log.reward_free(logged)
        norm = None if trainer is None else logged.get(trainer.log.grad_norm)
        if trainer is None or free is None or norm is None or not norm >= 0:
            return {}
        loss, kl = logged.get(trainer.log.loss), logged.get(trainer.log.first_kl)
        is_whole = free and trainer.log.loss_is_whole and loss is not None and kl is not None and kl > 0
        return {"free": free, "norm": norm} | ({"loss": loss, "kl": kl} if is_whole else {})

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step of which the log tells."""
        return run.by_step("free", "norm", "loss", "kl").drop_nulls("free").cast({"free": pl.Boolean})

    def quantities(self) -> Mapping[str, Quantity]:
        """Shares of steps, and means over them."""
        free, norm, by_kl = pl.col("free"), pl.col("norm"), pl.col("loss") / pl.col("kl")
        return {
            "steps_share": (free.mean(), "share"),
            "reward_free_steps": (free.sum(), "steps"),
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
        """A log that does not say which steps had reward variance."""
        return None if len(run.table) else self._not_logged(context)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information with a magnitude; a warning where such steps are many."""
        free, share, steps = run.count("reward_free_steps"), run["steps_share"], run.table["step"]
        if not free:
            return None
        moved = free - run.count("dead_steps")
        lines = logged_lines(len(steps), len(steps), steps[0], steps[-1])
        message = f"every group was zero-variance in {percent(share)} of {lines}; " + (
            f"{moved:,} of them updated the weights (mean logged gradient norm {number(run['grad_norm'])})"
            if moved
            else "none of them updated the weights: the logged gradient norm is 0"
        )
        if moved and run["grad_norm_ratio"] is not None:
            message += f", {number(run['grad_norm_ratio'])} times that of the other steps"
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
            headline=f"in {free:,} of {lines} every group had equal rewards; "
            + (f"{moved:,} of them still updated the weights" if moved else "none of them updated the weights"),
            message=message,
            evidence=evidence,
            advice=(
                "only the KL, entropy or auxiliary loss moved the weights: use dynamic sampling (DAPO), which drops "
                "zero-variance groups; with recorded rollouts `rolloutdoctor diff --fix zero-std` shows the effect"
                if moved
                else "use prompts that are neither too easy nor too hard, larger groups, or dynamic sampling (DAPO)"
            ),
        )

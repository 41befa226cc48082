"""RDI001: NaN and infinity in the rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

TOKEN_COLUMNS = (
    "policy_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "advantages",
    "kl",
    "values",
)
"""Columns that are looked at, where they are there or read for something else."""

LOSS_COLUMNS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "advantages")


class NonfiniteValues(TableRule):
    """NaN or infinity in log-probs, advantages or rewards.

    ## What it does
    Counts NaN and infinite values, separately for trained and for masked tokens.

    ## Why it matters
    One such value in a trained token makes the loss of the step NaN. In a masked token it does the same wherever the
    mask is applied by multiplication, as TRL does, since 0 * NaN is NaN. Loggers that skip NaN hide both.

    ## How it is measured
    `tokens` counts trained tokens with a non-finite value in any column, `masked_tokens` masked ones, `rows` the rows
    that hold either or whose reward is not finite. A log-prob above 0.34 counts as well: it is a probability above 1,
    by more than logits in bfloat16 round to. So does one below -1000: a placeholder or a bug. A missing reward is not a
    fault if the trainer leaves such rows out (TRL); NaN in `rollout_log_probs` means that the inference engine returned
    none. All other numbers of a report leave masked values out. Confirmed: the values are in the file.
    `undefined_advantages` counts rows whose advantage the trainer itself computes as NaN from finite values: an
    estimator that weights rewards by length divides by the trained tokens of the group, of which there are none if all
    of its rows were rejected. The mask keeps such a NaN out of the loss but not out of its gradient, so verl skips the
    whole optimizer step. Recomputed gradients leave masked tokens out: they say what the step would be without those
    rows. If these are the only ones, the verdict is exposed: the rows and the configuration would make it happen.

    ## What to do
    Look at the rows listed and find where the value comes from: an empty response, an overflowing exponential, a reward
    function that failed.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 0]], policy=float("nan"), mask=[[0, 0], [0, 1]])
    >>> diagnose_one("RDI001", batch, trainer="trl")
    'RDI001 error confirmed: tokens 1'
    """

    code = "RDI001"
    name = "nonfinite-values"
    references = (
        "https://github.com/huggingface/trl/issues/6702",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2084",
    )
    reads = ("reward", "logged_advantage")
    adds = ("all", "trained", "loss", "first_column", "first_token", "first_value", "undefined")
    needs_objective = False

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Every column that can hold such a value and enters a loss or an advantage."""
        columns = frozenset({"reward", "advantage", "response_mask", *TOKEN_COLUMNS})
        if context.objective is None:
            return columns
        needed = advantage_columns(context.objective)
        # Advantages that depend on which tokens are left can be undefined.
        return columns | needed if "response_mask" in needed else columns

    def unavailable_reason(self, context: Context) -> Missing | None:
        """No column to look at."""
        if context.columns.intersection(("reward", "advantage", *TOKEN_COLUMNS)):
            return None
        return Missing(
            "no column holds rewards, advantages or log-probs",
            context.recording.get("*", "record one of these columns under a name that `rolloutdoctor info` lists"),
        )

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count such tokens of each row: all, trained ones, those in the loss; and say where the first is."""
        from rolloutdoctor.rules.measures.impossible_values import impossible_values

        return impossible_values(block, TOKEN_COLUMNS, LOSS_COLUMNS)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor]":
        """Tell rows of groups without a trained token whose advantage is NaN although their score is finite."""
        rows = step.rows
        if rows is None or rows.advantage_N is None or rows.length_N is None:
            return {"undefined": step.batch.rows.diff() < 0}
        empty_N = (step.compared_sum(rows.length_N) == 0)[step.compared.index_N]
        return {"undefined": empty_N & rows.in_baseline_N & rows.advantage_N.isnan() & rows.score_N.isfinite()}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each row with such a value."""
        reward, logged = pl.col("reward"), pl.col("logged_advantage")
        leaves_out = context.objective is None or RowSet.UNSCORED in context.objective.baseline_rows.without
        bad = reward.is_infinite() | (reward.is_nan() & (not leaves_out)) | ~logged.is_finite()
        is_bad = pl.any_horizontal(pl.col("all", "trained", "loss") > 0, "bad_reward", pl.col("undefined") == 1)
        return rows.with_columns(bad_reward=bad.fill_null(False)).filter(is_bad)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of values that are not finite, and the step of the first."""
        bad = (pl.col("all") > 0) | pl.col("bad_reward")
        return {
            "tokens": (pl.sum("trained"), "tokens"),
            "rows": (bad.sum(), "rows"),
            "first_step": (pl.col("step").filter(bad | pl.col("undefined")).min(), "step"),
            "masked_tokens": (pl.sum("all") - pl.sum("trained"), "tokens"),
            "rewards": (pl.sum("bad_reward"), "rows"),
            "undefined_advantages": (pl.sum("undefined"), "rows"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Rows with the most such values."""
        return table.with_columns(value=pl.sum_horizontal("all", "bad_reward", "undefined"))

    def note(self, place: Mapping[str, Any]) -> str:
        """The first such value."""
        if place["first_column"] >= 0:
            name = TOKEN_COLUMNS[int(place["first_column"])]
            return f"{name} is {place['first_value']} at token {int(place['first_token'])}"
        if place["undefined"]:
            return "its group has no trained token, so its advantage is 0 / 0"
        return "reward or advantage is not finite"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where the loss or an advantage is reached, a warning where a mask stands before it."""
        rows, undefined_rows = run.count("rows"), run.count("undefined_advantages")
        if not rows and not undefined_rows:
            return None
        title = "the trainer" if context.trainer is None else context.trainer.title
        undefined = (
            f"{counted(undefined_rows, 'row')} in fully masked groups get the advantage 0 / 0; the mask hides it in "
            f"the loss but not in the gradient, so the gradient of the step is NaN and {title} skips the update"
        )
        if not rows:
            assert context.objective is not None  # it has advantages
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=(
                    f"{counted(undefined_rows, 'row')} have an advantage of 0 / 0 (NaN), first at step "
                    f"{run['first_step']}"
                ),
                message=undefined,
                evidence="the rows and the options imply it; no column shows the update",
                advice=(
                    "drop fully rejected groups from the batch, or use another estimator than "
                    f"{context.objective.advantage.estimator}"
                ),
            )
        rewards, masked = run.count("rewards"), run.count("masked_tokens")
        reached = bool(rewards) or bool((run.table["loss"] > 0).any())
        leak = (
            f"{title} multiplies by the mask, so even a masked NaN reaches its loss"
            if context.trainer is not None and context.trainer.masks_by_product
            else "harmless only where the mask selects tokens instead of multiplying"
        )
        parts = [f"{counted(run.count('tokens'), 'trained token')} and {counted(masked, 'masked token')}"]
        if rewards:
            parts.append(f"{counted(rewards, 'row')} with a reward or advantage that is not finite")
        return Judgement(
            severity=Severity.ERROR if reached else Severity.WARNING,
            confirmed=True,
            headline=(
                f"NaN, infinity or an impossible log-prob in {counted(rows, 'row')}, first at step {run['first_step']}"
            ),
            message=(
                "non-finite values or impossible log-probs (above 0, or below any float32 probability) in "
                f"{', '.join(parts)}"
            )
            + (f"; {leak}" if masked else "")
            + (f"; {undefined}" if undefined_rows else ""),
            evidence="the values are in the file",
            advice=(
                "find what wrote these values (rows under `where`); the report shows n/a wherever they enter a number"
            ),
        )

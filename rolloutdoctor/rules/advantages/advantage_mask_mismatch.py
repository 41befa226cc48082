"""RDA006: advantages of tokens that do not fit the mask."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.objective.required_columns import advantage_columns, has_time_axis
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


class AdvantageMaskMismatch(TableRule):
    """Advantages of tokens do not fit the mask: 0 on trained tokens, or different ones in a row.

    ## What it does
    For estimators with one advantage per row, looks at the logged advantages of its tokens: all trained tokens of a row
    must have the same, and none of them 0 while the row has another advantage.

    ## Why it matters
    Tokens with an advantage of 0 are not trained: with N turns and the last turn's advantage copied to all, (N - 1) / N
    of the rows learn nothing. No metric of the trainer shows it.

    ## How it is measured
    `zero_token_share` is the share of trained tokens that have an advantage of 0 in rows with another advantage, on
    other tokens or in the column `advantage`. Rows that are 0 throughout count in `dead_rows`, if the reward gives them
    another advantage and no known cause explains the logged ones. Values within a row count as different beyond the
    rounding radius of its advantage. `outside_tokens` are masked tokens whose value is neither 0 nor one of the row's
    trained tokens: the mask keeps them out of the loss, so by themselves they are information. Trainers that give every
    response token its row's advantage, masked or not, have none. Estimators with a time axis (GAE, discounted returns,
    credit by turn) have an advantage for each token and are not tested.

    ## What to do
    Give every row its own scalar advantage, and multiply that by the row's own mask.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> tokens = [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]
    >>> batch = toy_batch([[1, 0]], mask=[[1, 1, 1], [1, 1, 1]], per_token={"advantages": tokens})
    >>> diagnose_one("RDA006", batch, trainer="trl", scale_rewards="none")
    'RDA006 error confirmed: rows 1'
    """

    code = "RDA006"
    name = "advantage-mask-mismatch"
    references = (
        "https://github.com/NovaSky-AI/SkyRL/issues/1492",
        "https://github.com/volcengine/verl/issues/1527",
    )
    reads = ("advantage", "logged_advantage")
    adds = ("low", "high", "trained", "zero", "masked", "outside", "outside_mass", "mass", "radius")
    stages = ("advantages",)
    uses = ("advantage",)

    def inapplicable_reason(self, context: Context) -> str | None:
        """Return why the advantages of a row may differ from token to token."""
        if context.objective is None or not has_time_axis(context.objective):
            return None
        return "the estimator gives every token an advantage of its own"

    def columns(self, context: Context) -> frozenset[str]:
        """Advantages of tokens, the mask, and what the advantages need; nothing for estimators with a time axis."""
        if context.objective is None or has_time_axis(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"advantages", "response_mask"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Reduce the advantages of each row: on trained and on masked tokens."""
        import torch

        from rolloutdoctor.audit.logged import measure_advantages

        if not block.has("advantages", "response_mask"):
            return {}
        value_T, trained_T = block.column("advantages").double(), block.trained_T
        ends = measure_advantages(block)
        low_T, high_T = (block.runs.expand(ends[name]) for name in ("low", "high"))
        masked_T = ~trained_T & (value_T != 0) & value_T.isfinite()
        # A row without a trained token has no value to compare with.
        odd_T = masked_T & (low_T <= high_T) & ((value_T < low_T) | (value_T > high_T))
        size_T = value_T.abs().nan_to_num(0.0, 0.0, 0.0)
        return {
            **ends,
            "trained": block.row_sum(trained_T),
            "zero": block.row_sum(trained_T & (value_T == 0)),
            "masked": block.row_sum(masked_T),
            "outside": block.row_sum(odd_T),
            "outside_mass": block.row_sum(torch.where(odd_T, size_T, 0.0)),
            "mass": block.row_sum(size_T),
        }

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return the float32 radius of the advantage of each row."""
        is_known = step.rows is not None and step.rows.advantage_N is not None
        return {"radius": step.advantage_radius() if is_known else None}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return sums over rows with trained tokens of 0, with different values, and with 0 throughout; and places."""
        low, high, zero, radius = (pl.col(name) for name in ("low", "high", "zero", "radius"))
        is_trained = pl.col("trained") > 0
        stated = pl.col("logged_advantage")
        # For polars NaN is above every number.
        is_stated = (stated.abs() > radius).fill_null(value=False) & stated.is_not_nan().fill_null(value=False)
        elsewhere = (low < 0) | ((high > 0) & high.is_not_nan()) | (pl.col("masked") > 0) | is_stated
        spread, advantage = high - low, pl.col("advantage").abs()
        has_zero = is_trained & (zero > 0) & elsewhere
        is_dead = is_trained & (zero == pl.col("trained")) & ~has_zero & (advantage > radius) & advantage.is_not_nan()
        lines = rows.drop_nulls(["trained", "radius"]).with_columns(
            has_zero=has_zero, is_varying=is_trained & (spread > 2 * radius) & spread.is_not_nan(), is_dead=is_dead
        )
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum("trained", "is_dead", "is_varying", "outside", "outside_mass", "mass"),
            rows=(pl.col("has_zero") | pl.col("is_varying")).sum(),
            zeros=zero.filter("has_zero").sum(),
            dead_zeros=zero.filter("is_dead").sum(),
            widest=spread.filter("is_varying").max(),
        )
        size = zero * pl.col("has_zero") + pl.col("is_varying")
        return with_places(sums, lines.select(*NAMES, "zero", "low", "high", of="trained", value=size), context)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the numbers of rows and tokens."""
        return {
            "rows": (pl.sum("rows"), "rows"),
            "zero_tokens": (pl.sum("zeros").cast(pl.Int64), "tokens"),
            "zero_token_share": (pl.sum("zeros") / pl.sum("trained"), "share"),
            "dead_rows": (pl.sum("is_dead"), "rows"),
            "varying_rows": (pl.sum("is_varying"), "rows"),
            "largest_spread": (pl.max("widest").fill_null(0.0), "advantage"),
            "outside_tokens": (pl.sum("outside").cast(pl.Int64), "tokens"),
            "outside_mass_share": (pl.sum("outside_mass") / pl.sum("mass"), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the number of tokens, and the range of their advantages."""
        return (
            f"{int(place['zero'])} of {int(place['of'])} trained tokens have an advantage of 0; they range from "
            f"{place['low']:.4g} to {place['high']:.4g}"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No trained token has an advantage."""
        if run.table["trained"].sum() or not self.columns(context):
            return None
        return Missing("no step has a trained token with a logged advantage", "record advantages for every row")

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where trained tokens have another advantage than their row; outside of the mask information."""
        if self._is_by_token(context):
            return None
        dead = run.table if "advantages" in context.unexplained else run.table.clear()
        rows = run.count("rows") + int(dead["is_dead"].sum())
        if not rows:
            return self._outside(run)
        zero = run.count("zero_tokens") + int(dead["dead_zeros"].sum())
        share = percent(zero / run.table.select(pl.sum("trained")).item())
        parts = []
        if zero:
            parts.append(
                f"{counted(zero, 'trained token')} ({share}) have advantage 0 although other tokens of the same "
                "response do not"
            )
        if run["varying_rows"]:
            parts.append(
                f"{counted(run.count('varying_rows'), 'row')} have different advantages on their trained tokens, up to "
                f"{number(run['largest_spread'])} apart"
            )
        return Judgement(
            severity=Severity.ERROR,
            confirmed=True,
            headline=(
                f"advantages and mask disagree in {counted(rows, 'row')}: {share} of trained tokens have advantage 0"
            ),
            message="; ".join(parts),
            evidence="the logged per-token advantages; this estimator gives one value per response",
            advice="broadcast each response's scalar advantage over its own response mask, not over another row's",
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """A cause under which the tokens of a row have advantages of their own."""
        return "what RDA010 reports gives every token an advantage of its own" if self._is_by_token(context) else None

    def _is_by_token(self, context: Context) -> bool:
        """True if the whitening that was found gives the tokens of a row advantages of their own."""
        objective, names = context.objective, {cause.hypothesis for cause in context.causes.get("RDA010", ())}
        if objective is None or not names:
            return False
        from rolloutdoctor.search.hypotheses.whitening import WHITENINGS

        edits = [edit.objective for edit in WHITENINGS if edit.name in names and edit.objective is not None]
        return any(has_time_axis(edit(objective)) for edit in edits)

    def _outside(self, run: Measured) -> Judgement | None:
        if not run["outside_tokens"]:
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=(
                f"{counted(run.count('outside_tokens'), 'masked token')} have an advantage that differs from their "
                f"row's ({percent(run['outside_mass_share'])} of the total absolute advantage)"
            ),
            message=(
                f"{counted(run.count('outside_tokens'), 'masked token')} have an advantage that is neither 0 nor the "
                "row's; the mask keeps them out of the loss"
            ),
            evidence="the logged advantages of the tokens",
            advice="check that advantages and mask use the same token alignment",
        )

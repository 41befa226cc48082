"""RDA013: what a token weighs depends on how long its response is."""

from collections.abc import Mapping
from math import sqrt

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class LengthBias(TableRule):
    """The weight of a token in the loss depends on the length of its response.

    ## What it does
    Fits the weight of a token under the configured aggregation to a power of the response's length, and correlates
    advantage and length.

    ## Why it matters
    If every response has the same weight, each token of a long one has less: long wrong answers are punished less per
    token than short ones, and responses grow. If every token weighs the same, long responses dominate the gradient.
    Where advantage goes with length, either moves the length of responses.

    ## How it is measured
    `weight_exponent` is -1 if every response weighs the same and 0 if every token does. Lengths are numbers of trained
    tokens; the means of each step are subtracted before anything is summed. `length_up` and `length_down` are the mean
    lengths of responses with positive and with negative advantages, weighted by the gradient at importance ratio 1. It
    is information, from an exponent of one half or a correlation of 0.3 (and five times its standard error): the
    aggregation is a choice, and a correlation is a property of the task.

    ## What to do
    Nothing, if it is meant. Compare with `diff` under another aggregation.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0], [0, 1]], lengths=[2, 4, 4, 8])
    >>> diagnose_one("RDA013", batch, trainer="trl", loss_type="grpo")
    'RDA013 info exposed: weight_exponent -1'
    """

    code = "RDA013"
    name = "length-bias"
    rests_on = ("advantages",)
    references = (
        "https://arxiv.org/abs/2503.20783",
        "https://github.com/huggingface/trl/issues/3138",
        "https://github.com/volcengine/verl/issues/3741",
    )
    reads = ("trained_tokens", "weight", "advantage")
    splits = ("train",)

    exponent_from: float = 0.5
    correlation_from: float = 0.3
    errors: float = 5.0

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the loss."""
        return loss_columns(context.objective) if context.objective is not None else frozenset()

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the trained responses of each step that have a single advantage, less the means of the step."""
        length, weight, advantage = pl.col("trained_tokens"), pl.col("weight"), pl.col("advantage")
        gradient, x, y, u, v = weight * length * advantage.abs(), *map(pl.col, "xyuv")
        lines = rows.filter(length > 0, weight > 0, weight.is_finite(), advantage.is_finite()).select(
            *STEP_KEY,
            length=length,
            up=gradient * (advantage > 0),
            down=gradient * (advantage < 0),
            x=length - length.mean().over(STEP_KEY),
            y=advantage - advantage.mean().over(STEP_KEY),
            u=length.log() - length.log().mean().over(STEP_KEY),
            v=weight.log() - weight.log().mean().over(STEP_KEY),
        )
        return lines.group_by(STEP_KEY, maintain_order=True).agg(
            pl.sum("length", "up", "down"),
            rows=pl.len(),
            length_up=(pl.col("up") * pl.col("length")).sum(),
            length_down=(pl.col("down") * pl.col("length")).sum(),
            varies=(x != 0).any(),
            **{name: z.sum() for name, z in {"xx": x**2, "yy": y**2, "xy": x * y, "uu": u**2, "uv": u * v}.items()},
            products=((x * y) ** 2).sum(),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the correlations of weight and advantage with length."""
        return {
            "weight_exponent": (pl.sum("uv") / pl.sum("uu"), "1"),
            "advantage_length_correlation": (pl.sum("xy") / _spread(), "1"),
            "length_mean": (pl.sum("length") / pl.sum("rows"), "tokens"),
            "length_up": (pl.sum("length_up") / pl.sum("up"), "tokens"),
            "length_down": (pl.sum("length_down") / pl.sum("down"), "tokens"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No rows, or an estimator with several advantages a row."""
        if len(run.table):
            return None
        return Missing(
            "no row has a trained token and a single advantage", "widen --steps; estimators with a time axis have none"
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Responses of one length."""
        return None if run.table["varies"].any() else "all responses of a step have the same length"

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the correlation of advantage and length, whatever their distributions."""
        size = abs(run["advantage_length_correlation"] or 0.0)
        rows, error = int(run.table["rows"].sum()), run.table.select(pl.sum("products").sqrt() / _spread()).item()
        return Excluded(
            code=self.code,
            effect="a correlation of advantage and length",
            bound=min(size + reach(error if error > 0 else 0.0, rows), 1.0),
            unit="",
            estimate=size,
            limit=self.correlation_from,
            seen=rows,
            of="rows",
        )

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """Return the part that weights tokens."""
        return (Part.POLICY_LOSS,)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: aggregation is a choice, and a correlation a property of the task."""
        exponent, correlation = run["weight_exponent"] or 0.0, run["advantage_length_correlation"] or 0.0
        rows = int(run.table["rows"].sum())
        weighs = abs(exponent) >= self.exponent_from
        related = abs(correlation) >= self.correlation_from and abs(correlation) * sqrt(rows) >= self.errors
        if self.vacuous_reason(run, context) is not None or not (weighs or related):
            return None
        parts = []
        if weighs:
            power = "1/length" if f"{exponent:.2g}" == "-1" else f"length^{exponent:.2g}"
            less = "less" if exponent < 0 else "more"
            parts.append(
                f"each token weighs {power} of its response{_stated(context)}: long responses count {less} per token"
            )
        if related:
            parts.append(f"advantage and length correlate ({correlation:.2g})")
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline="; ".join(parts),
            message=(
                f"{'; '.join(parts)}, over {counted(rows, 'row')}; the gradient-weighted length is "
                f"{number(run['length_up'])} tokens where the advantage is positive and {number(run['length_down'])} "
                "where it is negative"
            ),
            evidence="the configured aggregation and the advantages; this is a design choice",
            advice="keep it if intended; `rolloutdoctor diff` shows the update under another aggregation",
        )


def _spread() -> pl.Expr:
    """The product of the norms of length and advantage, each less its mean."""
    return pl.sum("xx").sqrt() * pl.sum("yy").sqrt()


def _stated(context: Context) -> str:
    """Name the option that states the aggregation."""
    settings = {} if context.config is None else context.config.settings
    for name, setting in settings.items():
        option = name.rpartition(".")[2]
        if option in ("loss_type", "loss_agg_mode"):
            return f" ({option} {setting.value})"
    return ""

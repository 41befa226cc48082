"""RDA013: what a token weighs depends on how long its response is."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


@dataclass(frozen=True)
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
    `weight_exponent` is -1 where every response weighs the same, 0 where every token does. Lengths are trained tokens;
    means of the step are taken off before anything is added up. `length_up` and `length_down` are the mean lengths of
    responses with positive and negative advantages, weighted by the gradient at importance ratio 1. It is information,
    from an exponent of half or a correlation of 0.3 (five times its standard error) on: the aggregation is a choice,
    and a correlation is a property of the task.

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

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each trained response with a single advantage; `_off` is less the mean of its step."""
        length, weight, advantage = pl.col("length"), pl.col("weight"), pl.col("advantage")
        gradient = weight * length * advantage.abs()
        return (
            run.rows.rename({"trained_tokens": "length"})
            .filter(length > 0, weight > 0, weight.is_finite(), advantage.is_finite())
            .select(
                *STEP_KEY,
                length,
                up=gradient * (advantage > 0),
                down=gradient * (advantage < 0),
                length_off=length - length.mean().over(STEP_KEY),
                advantage_off=advantage - advantage.mean().over(STEP_KEY),
                log_length_off=length.log() - length.log().mean().over(STEP_KEY),
                log_weight_off=weight.log() - weight.log().mean().over(STEP_KEY),
            )
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the correlations of weight and advantage with length."""
        length, log_length = pl.col("length_off"), pl.col("log_length_off")
        advantage, log_weight = pl.col("advantage_off"), pl.col("log_weight_off")
        spread = (length**2).sum().sqrt() * (advantage**2).sum().sqrt()
        return {
            "weight_exponent": ((log_length * log_weight).sum() / (log_length**2).sum(), "1"),
            "advantage_length_correlation": ((length * advantage).sum() / spread, "1"),
            "length_mean": (pl.mean("length"), "tokens"),
            "length_up": ((pl.col("up") * pl.col("length")).sum() / pl.sum("up"), "tokens"),
            "length_down": ((pl.col("down") * pl.col("length")).sum() / pl.sum("down"), "tokens"),
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
        return None if (run.table["length_off"] != 0).any() else "all responses of a step have the same length"

    def excluded(self, run: Measured, context: Context) -> Excluded:
        """Bound the correlation of advantage and length, whatever their distributions."""
        size = abs(run["advantage_length_correlation"] or 0.0)
        squares = (pl.col("length_off") ** 2).sum().sqrt() * (pl.col("advantage_off") ** 2).sum().sqrt()
        product = pl.col("length_off") * pl.col("advantage_off")
        error = run.table.select((product**2).sum().sqrt() / squares).item()
        return Excluded(
            code=self.code,
            effect="a correlation of advantage and length",
            bound=min(size + reach(error if error > 0 else 0.0, len(run.table)), 1.0),
            unit="",
            estimate=size,
            limit=self.correlation_from,
            seen=len(run.table),
            of="rows",
        )

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """Return the part that weights tokens."""
        return (Part.POLICY_LOSS,)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: aggregation is a choice, and a correlation a property of the task."""
        exponent, correlation = run["weight_exponent"] or 0.0, run["advantage_length_correlation"] or 0.0
        rows = len(run.table)
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
            advice="no action if intended; `rolloutdoctor diff` shows the update under another aggregation",
        )


def _stated(context: Context) -> str:
    """Name the option that states the aggregation."""
    settings = {} if context.config is None else context.config.settings
    for name, setting in settings.items():
        option = name.rpartition(".")[2]
        if option in ("loss_type", "loss_agg_mode"):
            return f" ({option} {setting.value})"
    return ""

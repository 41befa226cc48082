"""RDG014: steps of a large gradient that few responses carry."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places


class SpikeAttributed(TableRule):
    """Few responses carry most of the gradient of a step whose gradient norm stands out.

    ## What it does
    Names the responses that carry half of the squared log-prob gradient of a step with a spike.

    ## Why it matters
    A spike that comes from a few responses is a data problem: a runaway ratio, an advantage that blew up, or one long
    response. They can be inspected and left out; a spike that all responses share comes from the policy or the learning
    rate.

    ## How it is measured
    The gradient is that of the loss with respect to the log-probs of the trained tokens, recomputed; its norm is L2. A
    spike is a step whose norm is above three times the median of the steps with a gradient, or whose logged gradient
    norm is above ten times its median (`RDT008`). `carriers` is the smallest number of responses that hold half of the
    squared norm, in the step where this is the smallest share; a finding requires that they are at most one in twenty
    (at least one response) of eight or more responses with a gradient. `top_share` is the share of the largest;
    `effective_tokens` is the squared L1 norm over the squared L2 norm, the number of tokens if all weighed the same.
    Information: it says where a spike comes from, not that it is wrong. In trainings of tiny models a response with
    half of the squared norm by log-probs was the largest by parameters in four of five steps (`docs/how-we-know.md`).

    ## What to do
    `rolloutdoctor diff --steps STEP:STEP+1 --top N` computes the step without them.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> steps = [toy_batch([[1, 0]] * 4, old=-1.0, policy=-1.0, step=step) for step in range(12)]
    >>> spike = toy_batch([[1, 0]] * 4, old=[[-6.0] * 4 if row == 1 else [-1.0] * 4 for row in range(8)], step=12)
    >>> report = diagnose([*steps, spike], trainer="trl", select=["RDG014"])
    >>> report.findings[0].headline
    '1 of 8 responses carries 100 % of the log-prob gradient at step 12, 52.5 times the median norm'
    """

    code = "RDG014"
    name = "spike-attributed"
    references = ("https://github.com/huggingface/trl/issues/6702",)
    reads = ("grad_l1", "grad_sq")
    splits = ("train",)

    fewest: int = 10
    fewest_rows: int = 8
    times: float = 3.0
    logged_times: float = 10.0
    share: float = 0.05
    carried: float = 0.5

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the loss."""
        return loss_columns(context.objective) if context.objective is not None else frozenset()

    def metrics(self, context: Context) -> frozenset[str]:
        """The logged gradient norm."""
        return frozenset({context.quantities["grad_norm"][0]} if "grad_norm" in context.quantities else ())

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the responses of each step with a gradient, and those that carry half of it."""
        square, step = pl.col("grad_sq"), list(STEP_KEY)
        lines = (
            rows.filter(square > 0, square.is_finite())
            .sort(*step, "grad_sq", "row", descending=[False, False, True, False])
            .with_columns(norm=square.sum().over(step).sqrt(), value=square / square.sum().over(step))
            .with_columns(
                carries=(pl.col("value").cum_sum() - pl.col("value")).over(step) < self.carried,
                effective=(pl.col("grad_l1").sum().over(step) / pl.col("norm")) ** 2,
            )
        )
        sums = lines.group_by(step, maintain_order=True).agg(
            pl.first("norm", "effective"),
            rows=pl.len(),
            carriers=pl.sum("carries"),
            carried=pl.col("value").filter("carries").sum(),
            top=pl.max("value"),
        )
        return with_places(sums, lines.filter("carries").select(*NAMES, "value"), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums and the responses; `few` if the step is a spike that few responses carry."""
        names, step = sorted(self.metrics(context)), list(STEP_KEY)
        logged = run.by_step(*names).select(*step, logged=names[0] if names else pl.lit(None, pl.Float64))
        norms = logged.filter(pl.col("logged") > 0, pl.col("logged").is_finite()).select(
            middle=pl.median("logged"), upper=pl.col("logged").quantile(0.75)
        )
        middle, upper = norms.row(0)
        stands_out = pl.col("norm") > self.times * pl.col("norm").median()
        if middle is not None and upper is not None:
            limit = max(self.logged_times * middle, middle + self.logged_times * (upper - middle))
            stands_out |= (pl.col("logged") > limit).fill_null(value=False)
        few = pl.col("carriers") <= pl.max_horizontal(1, self.share * pl.col("rows"))
        return (
            run.rows.join(logged, on=step, how="left", maintain_order="left")
            .with_columns(spike=stands_out & pl.col("norm").is_not_null())
            .with_columns(few=(pl.col("spike") & few & (pl.col("rows") >= self.fewest_rows)).fill_null(value=False))
            .with_columns(at_few=pl.col("few").any().over(step))
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of such steps, and the largest of them."""
        few, norm = pl.col("few"), pl.col("norm")
        largest = norm.filter(few).max()
        there = few & (norm == largest)
        return {
            "attributed_steps": (few.sum(), "steps"),
            "spike_steps": (pl.sum("spike"), "steps"),
            "carriers": (pl.col("carriers").filter(there).first(), "rows"),
            "carried_share": (pl.col("carried").filter(there).sum(), "share"),
            "top_share": (pl.col("top").filter(there).max(), "share"),
            "effective_tokens": (pl.col("effective").filter(there).first(), "tokens"),
            "norm_ratio": (largest / norm.median(), "1"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The responses that carry such steps, the largest share first."""
        return table.filter("at_few")

    def note(self, place: Mapping[str, Any]) -> str:
        """Their share."""
        return f"{percent(place['value'])} of the squared log-prob gradient of its step"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps."""
        steps = int(run.table["norm"].count())
        if steps >= self.fewest:
            return None
        return Missing(
            f"needs {self.fewest} steps with a gradient to estimate its usual norm; found {steps}", "widen --steps"
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information."""
        few = run.table.filter("few")
        if few.is_empty():
            return None
        worst = few.sort("norm", "step", descending=[True, False], maintain_order=True).row(0, named=True)
        carriers, rows, step = worst["carriers"], worst["rows"], worst["step"]
        verb = "carries" if carriers == 1 else "carry"
        headline = (
            f"{carriers:,} of {counted(rows, 'response')} {verb} {percent(run['carried_share'])} of the log-prob "
            f"gradient at step {step}, {number(run['norm_ratio'])} times the median norm"
        )
        steps = run.count("attributed_steps")
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=headline,
            message=(
                f"in {counted(steps, 'step')} of {counted(run.count('spike_steps'), 'step')} with a gradient spike, "
                f"one response in twenty or fewer carries half of the gradient or more. At step {step} the gradient "
                f"is as concentrated as {number(run['effective_tokens'])} tokens of equal weight."
            ),
            evidence="the gradient of the loss with respect to the log-probs, recomputed from the rows; others may "
            "carry that of the parameters",
            advice=(
                f"inspect these responses; `rolloutdoctor diff --steps {step}:{step + 1} --top {carriers}` recomputes "
                "the step without them"
            ),
        )

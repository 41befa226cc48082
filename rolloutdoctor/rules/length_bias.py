"""RDA013: what a token weighs depends on how long its response is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.ops.tally import Sums, ratio
from rolloutdoctor.results.findings import Example, Excluded, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class LengthTally(Sums):
    """What `length-bias` adds up over training steps, of rows with a trained token, less the means of their step.

    Attributes:
        rows: these rows.
        length_sq: squares of the lengths.
        advantage_sq: squares of the advantages.
        product: products of both.
        product_sq: their squares.
        log_length_sq: squares of the logarithms of the lengths.
        log_product: products of these and the logarithms of a token's weight.
        up: absolute gradient of rows with a positive advantage, at ratio 1.
        up_length: the same times their length.
        down: as `up`, of a negative advantage.
        down_length: as `up_length`, of a negative advantage.
        lengths: sum of the lengths themselves.
    """

    rows: int = 0
    length_sq: float = 0.0
    advantage_sq: float = 0.0
    product: float = 0.0
    product_sq: float = 0.0
    log_length_sq: float = 0.0
    log_product: float = 0.0
    up: float = 0.0
    up_length: float = 0.0
    down: float = 0.0
    down_length: float = 0.0
    lengths: float = 0.0

    @property
    def correlation(self) -> float | None:
        """Of advantage and length."""
        return ratio(self.product, sqrt(self.length_sq) * sqrt(self.advantage_sq))

    @property
    def exponent(self) -> float | None:
        """The power of the length that the weight of a token falls or grows with."""
        return ratio(self.log_product, self.log_length_sq)


@dataclass(frozen=True)
class LengthBias(Rule[LengthTally]):
    """What a token weighs in the loss depends on the length of its response.

    ## What it does
    Fits the weight of a token under the configured aggregation to a power of the response's length, and correlates
    advantage and length.

    ## Why it matters
    If every response weighs the same, a token of a long one weighs less: long wrong answers are punished less for each
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
    references = (
        "https://arxiv.org/abs/2503.20783",
        "https://github.com/huggingface/trl/issues/3138",
        "https://github.com/volcengine/verl/issues/3741",
    )
    tally = LengthTally
    splits = ("train",)

    exponent_from: float = 0.5
    correlation_from: float = 0.3
    errors: float = 5.0

    def columns(self, context: Context) -> frozenset[str]:
        """What the loss needs."""
        return loss_columns(context.objective) if context.objective is not None else frozenset()

    def measure_each(self, steps: "StepView") -> list[LengthTally]:
        """Add up the rows of each step."""
        rows, tokens = steps.rows, steps.tokens
        if rows is None or tokens is None or rows.advantage_N is None or rows.length_N is None:
            return steps.nothing(LengthTally)
        weight_N = tokens.weight_N
        here_N = (rows.length_N > 0) & (weight_N > 0) & rows.advantage_N.isfinite() & weight_N.isfinite()
        here = steps.by_step.only(here_N)
        length_n, advantage_n, weight_n = (x_N[here_N].double() for x_N in (rows.length_N, rows.advantage_N, weight_N))
        mass_n = weight_n * length_n * advantage_n.abs()
        up_n, down_n = mass_n * (advantage_n > 0), mass_n * (advantage_n < 0)
        off_n, value_n, log_off_n, log_weight_n = (
            x_n - here.expand(here.mean(x_n)) for x_n in (length_n, advantage_n, length_n.log(), weight_n.log())
        )
        return steps.tallies(
            LengthTally,
            rows=here.size,
            length_sq=here.sum(off_n**2),
            advantage_sq=here.sum(value_n**2),
            product=here.sum(off_n * value_n),
            product_sq=here.sum((off_n * value_n) ** 2),
            log_length_sq=here.sum(log_off_n**2),
            log_product=here.sum(log_off_n * log_weight_n),
            up=here.sum(up_n),
            up_length=here.sum(up_n * length_n),
            down=here.sum(down_n),
            down_length=here.sum(down_n * length_n),
            lengths=here.sum(length_n),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """None: it is about all rows."""
        return ()

    def measures(self, tally: LengthTally) -> Mapping[str, Measure]:
        """How weight and advantage go with length."""
        up, down = ratio(tally.up_length, tally.up), ratio(tally.down_length, tally.down)
        return {
            "weight_exponent": Measure(tally.exponent, "1"),
            "advantage_length_correlation": Measure(tally.correlation, "1"),
            "length_mean": Measure(ratio(tally.lengths, tally.rows), "tokens"),
            "length_up": Measure(up, "tokens"),
            "length_down": Measure(down, "tokens"),
        }

    def inconclusive_reason(self, run: LengthTally, context: Context) -> Missing | None:
        """No rows, or an estimator with several advantages a row."""
        if run.rows:
            return None
        return Missing(
            "no row has a trained token and a single advantage", "widen --steps; estimators with a time axis have none"
        )

    def vacuous_reason(self, run: LengthTally, context: Context) -> str | None:
        """Responses of one length."""
        return None if run.length_sq else "all responses of a step have the same length"

    def excluded(self, run: LengthTally, context: Context) -> Excluded:
        """How far advantage and length may go together, whatever their distributions."""
        size = abs(run.correlation or 0.0)
        error = ratio(sqrt(run.product_sq), sqrt(run.length_sq) * sqrt(run.advantage_sq)) or 0.0
        return Excluded(
            code=self.code,
            effect="a correlation of advantage and length",
            bound=min(size + reach(error, run.rows), 1.0),
            unit="",
            estimate=size,
            limit=self.correlation_from,
            seen=run.rows,
            of="rows",
        )

    def decisive_parts(self, run: LengthTally, context: Context) -> tuple[Part, ...]:
        """How tokens are weighed."""
        return (Part.POLICY_LOSS,)

    def judge(self, run: LengthTally, context: Context) -> Judgement | None:
        """Information: aggregation is a choice, and a correlation a property of the task."""
        exponent, correlation = run.exponent or 0.0, run.correlation or 0.0
        weighs = abs(exponent) >= self.exponent_from
        related = abs(correlation) >= self.correlation_from and abs(correlation) * sqrt(run.rows) >= self.errors
        if not run.length_sq or not (weighs or related):
            return None
        found = {name: measure.value for name, measure in self.measures(run).items()}
        parts = []
        if weighs:
            parts.append(f"a token weighs as the length of its response to the power of {exponent:.2g}")
        if related:
            parts.append(f"advantage and length have a correlation of {correlation:.2g}")
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline="; ".join(parts),
            message=f"{'; '.join(parts)}, over {counted(run.rows, 'row')}; weighted by the gradient, responses with a "
            f"positive advantage have {number(found['length_up'])} tokens, those with a negative one "
            f"{number(found['length_down'])}",
            evidence="the configured aggregation and the advantages; it is a choice",
            advice="no action if it is meant; `diff` shows the update under another aggregation",
        )

"""RDO011: positions that count the padding of a micro-batch."""

from collections.abc import Mapping
from math import comb, inf, log2, sqrt
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.measures.padding_correlations import MOMENTS, padding_correlations
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

ADVICE = "pass position ids and an attention mask that exclude the left padding, or pack sequences without padding"


class PositionShift(TableRule):
    """The gap of sampler and trainer grows with a row's left padding in its micro-batch.

    ## What it does
    Correlates the mean gap of each row with its left padding: how much shorter its prompt is than the longest of its
    micro-batch.

    ## Why it matters
    A trainer whose positions count the padding, or whose attention includes it, scores the responses to short prompts
    as if they stood elsewhere; the engine, which packs or pads on the other side, does not. Rows without padding are
    right, so that the mean over a step looks like noise. A shift by the same number for all tokens does not change a
    model with relative positions: it shows only where padding is seen, or positions are absolute or split.

    ## How it is measured
    The gap is the mean absolute difference on trained tokens with a sampler probability below 0.9, of eight or more in
    a row; in a step with more than 32,768 response tokens every second token is looked at, every third and so on. Steps
    count that have 16 rows or more, five without padding and eight with it. In each, Spearman's correlation of gap and
    left padding is taken, and the same with the length of the response, and of the prompt, partialled out: gaps that
    grow with length grow with padding too, and a long prompt has little of it. A finding requires medians over steps of
    0.5 with and without the response's length and 0.3 without the prompt's, and that the more padded half of the padded
    rows has twice the gap of rows without padding, in medians; or, whatever the correlations, that it has ten times
    that gap, and at least 0.001 nats. It is also found if in some steps every padded row, of four such tokens or more,
    has a larger gap than every other row, and the median of the padded ones is five times that of the others and at
    least 0.001 nats: for rows divided at random this has a probability of at most 2^-20 over all steps with both kinds.
    Clean excludes a slope, the lengths of prompt and response partialled out, that would make it so: its upper bound
    comes from errors that need not be equal from row to row.

    ## What to do
    Give the trainer position ids and an attention mask that leave the padding out, or pack without padding.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO011", toy_batch([[1, 0]], rollout=-1.0), trainer=None)
    'RDO011 skipped: missing columns micro_batch_id, prompt_ids'
    """

    code = "RDO011"
    name = "position-shift"
    references = (
        "https://github.com/unslothai/unsloth/pull/6738",
        "https://github.com/huggingface/trl/issues/6800",
    )
    reads = ("tokens", "micro_batch_id", "optim_step_id", "rank")
    adds = ("unsure", "size", "prompt_tokens")
    needs_objective = False
    splits = ("train",)
    needs = ("old_log_probs", "rollout_log_probs", "micro_batch_id", "prompt_ids")
    uses = ("response_mask", "optim_step_id", "rank")

    least_rows: int = 16
    level: float = 0.5
    level_less_prompt: float = 0.3
    factor: float = 2.0
    factor_alone: float = 10.0
    least_alone: float = 1e-3
    factor_apart: float = 5.0
    least_bits: float = 20.0

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Unsure tokens of each row and the sum of the sizes of their gaps."""
        from rolloutdoctor.rules.measures.sampler_gap import gap_of, sizes_of_rows

        gap = gap_of(block)
        return {} if gap is None else sizes_of_rows(gap)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The prompts' lengths."""
        from rolloutdoctor.data.schema import PROMPT_LENGTH

        return {"prompt_tokens": step.batch.per_row.get(PROMPT_LENGTH)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each step with rows whose left padding is known."""
        padding, gap, unsure = pl.col("padding"), pl.col("gap"), pl.col("unsure")
        micro_batch = (*STEP_KEY, "optim_step_id", "rank", "micro_batch_id")
        rows = (
            rows.filter(pl.col("prompt_tokens") >= 0, pl.col("micro_batch_id") >= 0)
            .with_columns(padding=pl.col("prompt_tokens").max().over(micro_batch) - pl.col("prompt_tokens"))
            .filter(unsure >= 4)
            .with_columns(gap=pl.col("size") / unsure)
        )
        plain, padded = gap.filter(padding == 0), gap.filter(padding > 0)
        is_apart = (padded.min() > plain.max()) & (padded.median() >= self.factor_apart * plain.median())
        steps = rows.group_by(STEP_KEY, maintain_order=True).agg(
            plain_rows=plain.len(),
            padded_rows=padded.len(),
            apart=(is_apart & (padded.median() >= self.least_alone)).fill_null(value=False),
            apart_plain=plain.median(),
            apart_padded=padded.median(),
        )
        number_of = [is_part.sum().over(STEP_KEY) for is_part in (padding >= 0, padding == 0, padding > 0)]
        enough = [number >= least for number, least in zip(number_of, (self.least_rows, 5, 8), strict=True)]
        tested = rows.filter(unsure >= 8).filter(*enough)
        return steps.join(padding_correlations(tested), on=STEP_KEY, how="left", maintain_order="left")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The steps."""
        return run.rows

    def quantities(self) -> Mapping[str, Quantity]:
        """The correlations, and the gap of rows with and without padding."""
        return {
            "correlation": (pl.median("correlation"), "1"),
            "correlation_less_response": (pl.median("less_response"), "1"),
            "correlation_less_prompt": (pl.median("less_prompt"), "1"),
            "gap_without_padding": (pl.median("gap"), "nats"),
            "gap_padded": (pl.median("gap_padded"), "nats"),
            "rows": (pl.sum("rows"), "rows"),
            "padded_rows": (pl.sum("padded"), "rows"),
        }

    def _apart(self, run: Measured) -> tuple[pl.DataFrame, int, float]:
        """Steps in which all padded rows have larger gaps than the others, by far.

        And how many have rows of both kinds, and how unlikely the first are, in bits.
        """
        table = run.table
        apart, mixed = table.filter("apart"), len(table.filter(pl.col("plain_rows") > 0, pl.col("padded_rows") > 0))
        sizes = apart.select("plain_rows", "padded_rows").iter_rows()
        return apart, mixed, sum(log2(comb(plain + padded, plain)) - log2(mixed) for plain, padded in sizes)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No step has rows with padding and rows without."""
        if run["rows"] or self._apart(run)[2] >= self.least_bits:
            return None
        return Missing(
            f"no step has {self.least_rows} rows in micro-batches of prompts of different lengths",
            "record more rows of each step",
        )

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the growth of the gap with padding; twice the gap at much padding would be found."""
        of, rows = run.table.select(pl.sum(*MOMENTS, "freedom")).to_dicts()[0], run.count("rows")
        slope, error = of["11"] / of["20"] if of["20"] else 0.0, inf
        if of["20"] and of["freedom"] > 0:
            meat = max(of["22"] - 2 * slope * of["31"] + slope**2 * of["40"], 0.0)
            error = sqrt(meat * rows / of["freedom"]) / of["20"]
        gap, padding = run["gap_without_padding"] or 0.0, run.table.select(pl.median("padding")).item()
        return Excluded(
            code=self.code,
            effect="a rise of the gap",
            bound=100 * (slope + reach(error, of["freedom"])),
            unit="nats per 100 tokens of left padding",
            estimate=100 * slope,
            limit=100 * max((self.factor - 1) * gap, self.least_alone) / padding,
            seen=rows,
            of="rows",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning: the log-probs show it, and no logged value proves it."""
        apart, mixed, bits = self._apart(run)
        if bits >= self.least_bits:
            plain, padded = apart.select(pl.median("apart_plain", "apart_padded")).row(0)
            steps = f"{counted(len(apart), 'step')} of {mixed:,}"
            return Judgement(
                severity=Severity.WARNING,
                confirmed=False,
                headline=(
                    f"left padding changes the trainer's log-probs: sampler mismatch {number(plain)} nats unpadded "
                    f"and {number(padded)} padded, in {steps}"
                ),
                message=(
                    f"in {steps} every left-padded row has a larger sampler mismatch than every unpadded row: "
                    f"{number(padded)} nats (median) against {number(plain)}"
                ),
                evidence=f"chance would sort the rows this way with probability 2^-{bits:.0f}",
                advice=ADVICE,
            )
        if not run["rows"]:
            return None
        overall, response, prompt, plain, padded = (run[name] or 0.0 for name in list(self.quantities())[:5])
        goes = (
            min(overall, response) >= self.level and prompt >= self.level_less_prompt and padded >= self.factor * plain
        )
        if not goes and (padded < self.factor_alone * plain or padded < self.least_alone):
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=(
                f"the sampler mismatch correlates with left padding (Spearman {overall:.2f}): median {number(plain)} "
                f"nats unpadded, {number(padded)} most padded"
            ),
            message=(
                f"in {counted(run.table['rows'].count(), 'step')} the mismatch of a row correlates with its left "
                f"padding in the micro-batch: Spearman {overall:.2f}, controlling for response length {response:.2f}, "
                f"for prompt length {prompt:.2f}"
            ),
            evidence="the log-probs of sampler and trainer, the prompt lengths and the micro-batches",
            advice=ADVICE,
        )

"""RDI007: the token that ends a response is masked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class EosNotTrained(TableRule):
    """The end-of-sequence token is masked: the model is never taught to stop.

    ## What it does
    Looks for stopped responses that end with the end-of-sequence token at a mask of 0, and whose last trained token is
    another one.

    ## Why it matters
    The decision to stop is a token like any other. Without it in the loss no reward reaches it, and the length of
    responses drifts until they are cut off. A mask made of "token is not padding" does this where the tokenizer pads
    with its end-of-sequence token.

    ## How it is measured
    The rows tested have a `status` of stop (eos, completed, finished) and a trained token. The end-of-sequence token is
    the one id that ends at least 90 % of the stopped responses of a step, eight or more; if there is none, as with stop
    strings, the rule cannot tell. Trajectories that end with the output of a tool carry the token twice, and the last
    trained token is then the model's own end: no finding. It is a warning from 10 % of these rows, else information:
    rejection and filters may mask single tokens. `gradient_lost_share` is what the token would add to the absolute
    gradient, at the mean of its row.

    ## What to do
    Extend the mask by the token that ended the response; do not mask by comparing with the padding token.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0] * 4], mask=[[1, 1, 0]] * 8, per_token={"response_ids": [[5, 6, 2]] * 8})
    >>> diagnose_one("RDI007", replace(batch, statuses=["stop"] * 8), trainer=None)
    'RDI007 warning confirmed: rows_share 1'
    """

    code = "RDI007"
    name = "eos-not-trained"
    references = (
        "https://github.com/volcengine/verl/issues/3805",
        "https://github.com/huggingface/trl/issues/4974",
    )
    reads = ("grad_l1",)
    adds = ("last", "last_trained", "ends_trained", "trained", "gap")
    needs_objective = False
    splits = ("train",)
    needs = ("response_ids", "response_mask", "status")

    end_share: float = 0.9
    fewest_ends: int = 8
    warn_from: float = 0.1

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Read how each row ends."""
        from rolloutdoctor.evaluation.response_ends import response_ends

        return response_ends(block)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the stopped rows of each step with a trained token, and those whose end token is masked.

        `end` is null where no token ends those of its step.
        """
        from rolloutdoctor.evaluation.response_ends import STOPPED

        last, end, count = pl.col("last"), pl.col("end"), pl.len().over(STEP_KEY)
        ends = (count >= self.fewest_ends) & (pl.len().over(*STEP_KEY, "last") >= self.end_share * count)
        stopped = rows.filter(pl.col("status").str.to_lowercase().is_in(STOPPED), pl.col("trained") > 0)
        masked = (last == end) & ~pl.col("ends_trained").cast(pl.Boolean) & (pl.col("last_trained") != end)
        lines = stopped.with_columns(end=last.filter(ends).first().over(STEP_KEY)).with_columns(
            masked=masked.fill_null(value=False)
        )
        is_known, gradient = end.is_not_null(), pl.col("grad_l1")
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            stopped=pl.len(),
            known=is_known.sum(),
            masked=pl.sum("masked"),
            gradient=gradient.filter(is_known).sum(),
            lost=(gradient / pl.col("trained")).filter("masked").sum(),
        )
        return with_places(sums, lines.select(*NAMES, "end", value=pl.col("masked").cast(pl.Float64)), context)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of rows, and what they would add."""
        masked, lost = pl.sum("masked"), pl.sum("lost")
        return {
            "rows_share": (masked / pl.sum("known"), "share"),
            "rows": (masked, "rows"),
            "stopped_rows": (pl.sum("stopped"), "rows"),
            "gradient_lost_share": (lost / (pl.sum("gradient") + lost), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """The token."""
        return f"ends with token {place['end']}, which is masked"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No stopped row, or no token that ends them."""
        if run.table["known"].sum():
            return None
        if not len(run.table):
            return Missing("no response stopped with a trained token", "widen --steps, or record more rows")
        return Missing(
            f"no single token ends {percent(self.end_share)} of the stopped responses of a step, {self.fewest_ends} or "
            "more: stop strings, or several end-of-sequence tokens",
            "record whole steps; with stop strings there is no such token",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where it is usual, information where it is rare."""
        if not run["rows"]:
            return None
        share, lost, known_ends = run["rows_share"] or 0.0, run["gradient_lost_share"], int(run.table["known"].sum())
        return Judgement(
            severity=Severity.WARNING if share >= self.warn_from else Severity.INFO,
            confirmed=True,
            headline=f"the end-of-sequence token is masked in {percent(share)} of the responses that stopped",
            message=(
                f"{counted(run.count('rows'), 'response')} of {known_ends:,} that stopped end with the "
                "usual end token, and the mask excludes it from the loss"
            )
            + ("" if lost is None else f"; training it would add {percent(lost)} to sum |gradient|"),
            evidence="finish reasons, token ids and mask; the end token is inferred from the responses",
            advice=(
                "include the end-of-sequence token in the mask; do not build the mask with `ids != pad_token_id` "
                "where pad and eos are the same token"
            ),
        )

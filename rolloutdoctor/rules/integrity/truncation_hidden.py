"""RDI011: responses that were cut off and do not count as such."""

from collections.abc import Mapping
from math import exp, lgamma, nan
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.integrity.duplicate_responses import SAMPLER
from rolloutdoctor.rules.measures.length_limit import stated_limit
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


class TruncationHidden(TableRule):
    """Responses that were cut off at the length limit count as finished.

    ## What it does
    Looks for rows at the largest length of the run that have a `status` of stop and no end-of-sequence token, and
    compares the logged share of responses that were cut off with the rows. Looks for rows of the stated limit whose
    last token ends them though the sampler gave it almost no probability.

    ## Why it matters
    Masks, penalties and alarms for truncated responses rely on the finish reason. A response that was cut off and
    counts as finished is scored as a wrong answer, or as a right one that never ended.

    ## How it is measured
    The end-of-sequence token is the one id that ends at least 90 % of the stopped responses of a step, eight or more.
    Five or more rows of the run's largest length without it, with at most a fifth as many one token shorter, are a
    pile-up at a cap: an error, since their status says otherwise. Fewer than five, or lengths that taper off, are stop
    strings and chance, and no finding. An end-of-sequence token that was forced at the limit has the log-prob that the
    sampler gave it: if the product of these chances, times the ways to choose the rows, is below exp(-16), it is a
    warning. A logged share of 0 in steps in which rows have a status of length is a warning: verl compares lengths with
    the padded width, and another limit may cut before that. If no token ends the responses and no share is logged, the
    rule cannot tell; nor can it if rows at the limit end there and the log-probs do not show which were forced.

    ## What to do
    Take the finish reason from the engine. Count, mask or penalise these rows as what they are.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> ids = [[5, 2]] * 60 + [[5, 6, 7, 8]] * 6
    >>> batch = toy_batch([[1, 0] * 33], lengths=[2] * 60 + [4] * 6, per_token={"response_ids": ids})
    >>> diagnose_one("RDI011", replace(batch, statuses=["stop"] * 66), trainer=None)
    'RDI011 error confirmed: hidden_rows 6'
    """

    code = "RDI011"
    name = "truncation-hidden"
    references = (
        "https://github.com/volcengine/verl/issues/7823",
        "https://github.com/volcengine/verl/issues/7817",
        "https://github.com/huggingface/trl/issues/3248",
    )
    reads = ("tokens",)
    adds = ("last", "log_prob", "logged")
    needs_objective = False
    splits = ("train",)
    needs = ("status",)
    uses = ("response_ids", "response_mask", "advantage", "advantages", *SAMPLER)

    end_share: float = 0.9
    fewest_ends: int = 8
    fewest: int = 5
    nats: float = 16.0
    """A chance of 1e-7 for a run."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Read the last token of each row, and its log-prob."""
        import torch

        from rolloutdoctor.evaluation.response_ends import response_ends

        if not block.is_logged("response_ids"):
            return {}
        measures, name = (
            {"last": response_ends(block)["last"]},
            next((column for column in SAMPLER if block.is_logged(column)), ""),
        )
        if name:
            is_filled_n, ends = block.runs.lengths > 0, block.runs.offsets[1:]
            measures["log_prob"] = torch.full_like(ends, nan, dtype=torch.float64)
            measures["log_prob"][is_filled_n] = block.column(name)[ends[is_filled_n] - 1].double()
        return measures

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The advantage that was logged for each row."""
        return {"logged": step.logged_advantages()}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """The logged share of responses that were cut off, where the rows are all rows of the step."""
        names = None if step.log.writer is None or step.omits_rows else step.log.writer.log.ends
        return {} if names is None else {"share": step.logged.get(names[0])}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step, by how they count and how they end, and the hidden ones."""
        from rolloutdoctor.evaluation.response_ends import STOPPED

        word, length, log_prob = pl.col("status").str.to_lowercase(), pl.col("tokens"), pl.col("log_prob")
        stopped, less = pl.col("is_stopped"), length.max().over(STEP_KEY) - length
        ended = (stopped & pl.col("last").is_not_null()).sum()
        ends, of_all = ended.over(*STEP_KEY, "last"), ended.over(STEP_KEY)
        is_end, is_known = pl.col("is_end"), pl.col("is_end").any().over(STEP_KEY)
        is_open, hidden = is_known & stopped & ~is_end, pl.col("is_hidden")
        at_limit, mass = length == pl.lit(stated_limit(context), pl.Int64), pl.col("logged").abs().fill_nan(0.0)
        lines = (
            rows.with_columns(
                is_stopped=(word.is_in(STOPPED) & (length > 0)).fill_null(value=False),
                is_cut=word.is_in(TRUNCATED).fill_null(value=False),
                has_status=(word.str.len_bytes() > 0).fill_null(value=False),
            )
            # The id that ends nearly all stopped rows of a step: no two do.
            .with_columns(is_end=(of_all >= self.fewest_ends) & (ends >= self.end_share * of_all))
            .with_columns(
                known=is_known,
                is_hidden=is_open & (less == 0),
                is_beside=(is_open & (less == 1)) | (is_end & (less == 0)),
                ended=log_prob.is_finite() & at_limit & stopped,
            )
        )
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            longest=length.filter("known").max(),
            hidden=hidden.sum(),
            beside=pl.sum("is_beside"),
            told=(pl.col("known") & pl.col("has_status")).sum(),
            mass=mass.filter("known").sum(),
            hidden_mass=mass.filter("known", hidden).sum(),
            cut=pl.sum("is_cut"),
            cut_share=pl.mean("is_cut"),
            all_told=pl.col("has_status").all(),
            at_limit=(log_prob.is_not_null() & at_limit).sum(),
            ended=pl.sum("ended"),
            nats=-log_prob.filter("ended").sum(),
        )
        places = lines.select(*NAMES, "tokens", value=pl.when("is_hidden").then("tokens"))
        return with_places(sums, places, context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums beside the logged share, and the rows."""
        lines = run.rows.join(run.by_step("share"), on=STEP_KEY, how="left", maintain_order="left")
        compared = (pl.col("share").is_between(0, 1) & pl.col("all_told")).fill_null(value=False)
        return lines.with_columns(compared=compared, below=compared & (pl.col("share") == 0) & (pl.col("cut") > 0))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of rows, and the size of their advantages."""
        hidden, is_known = pl.col("hidden").filter(_at_cap()).sum(), pl.col("longest").is_not_null()
        compared, below = pl.sum("compared"), pl.sum("below")
        return {
            "hidden_rows": (pl.when(is_known.any()).then(hidden), "rows"),
            "hidden_share": (hidden / pl.sum("told"), "share"),
            "length": (pl.max("longest"), "tokens"),
            "advantage_mass_share": (pl.col("hidden_mass").filter(_at_cap()).sum() / pl.sum("mass"), "share"),
            "truncated_rows": (pl.sum("cut"), "rows"),
            "steps_below": (pl.when(compared > 0).then(below), "steps"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the length of the response."""
        return f"{place['tokens']:,} tokens, status {place['status']}, and no end of sequence"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Neither a token that ends responses nor a logged share."""
        if run["length"] is not None or run["steps_below"] is not None:
            return None
        return Missing(
            "no single token ends the responses, and no share of truncated responses was logged",
            context.to_record("response_ids"),
        )

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Ends at the limit that were sampled, or put there: their log-probs do not tell."""
        at_limit, ended, nats = _ends(run.table)
        if not ended:
            return None
        return Missing(
            f"{counted(ended, 'response')} of {at_limit:,} at the limit ended there, with a chance of "
            f"{percent(exp(-nats / ended))} each: too few, or too likely, to distinguish sampled ends from others",
            "use the engine's finish reason, and inspect rows of the largest length that count as finished",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where rows say so themselves, a warning where they do not reproduce the log."""
        hidden, cap, mass = run.count("hidden_rows"), run.count("length"), run["advantage_mass_share"]
        shorter = int(run.table.filter(_at_cap())["beside"].sum())
        at_limit, ended, nats = _ends(run.table)
        # Whichever of the rows at the limit these are.
        ways = lgamma(at_limit + 1) - lgamma(ended + 1) - lgamma(at_limit - ended + 1)
        below = run.count("steps_below")
        if hidden >= self.fewest and hidden >= self.fewest * shorter:
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=(
                    f"{counted(hidden, 'response')} of {cap:,} tokens count as finished although they were truncated "
                    "(no end token)"
                ),
                message=(
                    f"{counted(hidden, 'response')} have the largest length of the run ({cap:,} tokens) and status "
                    "stop, but do not end with the end token of the others"
                )
                + ("" if mass is None else f"; they carry {percent(mass)} of the total absolute advantage"),
                evidence=f"{counted(shorter, 'row')} have one token less or an end token: the lengths pile up at a cap",
                advice="use the engine's finish reason, then mask, penalize or count these responses as truncated",
            )
        if ended >= self.fewest and nats - ways > self.nats:
            return Judgement(
                severity=Severity.WARNING,
                confirmed=True,
                headline=f"{counted(ended, 'response')} at the length limit end with a token that was not sampled",
                message=(
                    f"{ended:,} of {counted(at_limit, 'response')} at the stated limit count as finished, but the "
                    "sampler gave their last token almost no probability: it was appended"
                ),
                evidence=(
                    f"the log-probs of these tokens: the chance of so many sampled ends is below exp(-{self.nats:.0f})"
                ),
                advice="use the engine's finish reason, then mask, penalize or count these responses as truncated",
                measures={"forced_ends": Measure(ended, "rows")},
            )
        if below:
            share = run.table.filter("below").select(pl.mean("cut_share")).item()
            return Judgement(
                severity=Severity.WARNING,
                confirmed=True,
                headline=f"the log shows no truncated responses in {counted(below, 'step')} that have some",
                message=(
                    f"{percent(share)} of the rows of {counted(below, 'step')} have status length, but the logged "
                    "share of truncated responses is 0"
                ),
                evidence="the finish reasons of the rows and the trainer's log, which uses another length limit",
                advice="trust the rows, and set the trainer's length limit to the one that truncates",
            )
        return None


def _at_cap() -> pl.Expr:
    """Steps whose largest length is that of the run."""
    return (pl.col("longest") == pl.max("longest")).fill_null(value=False)


def _ends(table: pl.DataFrame) -> tuple[int, int, float]:
    """Rows at the limit, those of them that count as finished, and minus the log of the chance that they end there."""
    return table.select(pl.sum("at_limit", "ended", "nats")).row(0)

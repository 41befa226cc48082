"""RDI005: numbers that stand for log-probs that nobody computed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.measures.placeholders import CERTAIN, PLACEHOLDERS, SIDES, TAILS, placeholders_of, sums_of
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_sums

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


APART = 0.75
"""Nats by which the other log-prob must differ: more than top-p 0.5 does to a token that it keeps alone."""


class LogProbPlaceholder(TableRule):
    """Placeholders stand for log-probs that were never computed: 0.0, 1.0, -1.0 or -9999.

    ## What it does
    Finds trained tokens with a log-prob of exactly 0.0, 1.0 or -1.0, of -1000 or less, or above 0, where the other
    engine's says something else; and rows that end with the same log-prob three times.

    ## Why it matters
    Engines return no log-prob for tokens that were appended by hand, tokenized again or lost. Filled with 0.0, a token
    of true log-prob -10.8 has a ratio that is off by 4.8e4: it drops out of the update, or dominates a mean.

    ## How it is measured
    Only exact values count, on tokens whose two log-probs are 0.75 nats apart or more: engines return exactly 0.0 where
    p is 1 within float32 and where top-p keeps a single token, and a collapsed policy has nothing else. A finding
    requires three tokens of one kind, or three rows that end alike. Zeros do not count unless they are three times as
    many as such tokens with a log-prob between -0.01 and 0: an engine with stale weights is certain and wrong on both.
    `weight_share` is the placeholders' share of the sum of the importance weights exp(delta), delta within +-20, over
    sampled rows. It is an error for values that no log-prob can have, a warning for 0.0 and -1.0, which a model could
    give by chance.

    ## What to do
    Record NaN where the engine gave none, and leave such tokens out of the mask or give them a ratio of 1.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> rollout = [[-2.1, -1.4, 0.0, 0.0], [-2.0, -1.3, -1.9, 0.0]]
    >>> diagnose_one("RDI005", toy_batch([[1, 0]], policy=-2.0, rollout=rollout), trainer=None)
    'RDI005 warning confirmed: tokens 3'
    """

    code = "RDI005"
    name = "logprob-placeholder"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/pull/4218",
        "https://github.com/vllm-project/vime/pull/70",
        "https://github.com/huggingface/trl/issues/2496",
    )
    adds = (
        *("count", "sampled", "zeros", "weights", "placeholder_weights", "first", *SIDES),
        *(*PLACEHOLDERS, *CERTAIN, *TAILS),
    )
    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs")
    uses = ("response_mask",)

    least_tokens: int = 3

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the tokens and placeholders of each row, and keep the log-probs of its first placeholder."""
        import torch

        from rolloutdoctor.ops.elementwise import outside
        from rolloutdoctor.rules.measures.sampled_rows import gap_of

        gap = gap_of(block)
        if gap is None:
            return {}
        measures = dict.fromkeys(self.adds, torch.zeros(len(block.runs), dtype=torch.float64)) | {"count": gap.count_N}
        # The extremes settle it for nearly every healthy block.
        is_apart = gap.low < -APART or gap.high > APART
        places = outside(gap.apart_T, -APART, APART) if is_apart else None
        return measures if places is None else measures | placeholders_of(block, places)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Add up the tokens and weights of the sampled rows."""
        sample = step.sample()
        return {} if sample is None else sums_of(sample, len(step.batch))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each row that has some."""
        placeholders, tails = pl.sum_horizontal(PLACEHOLDERS), pl.sum_horizontal(TAILS)
        lines = rows.drop_nulls("count").with_columns(found=placeholders, tails=tails)
        sums = ("count", "sampled", "zeros", "weights", "placeholder_weights", *CERTAIN)
        return with_sums(lines, (pl.col("found") > 0) | (pl.col("tails") > 0), *sums)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of placeholders, and their share of the weights."""
        placeholders, tails = pl.col("found"), pl.col("tails")
        return {
            "tokens": (placeholders.sum().cast(pl.Int64), "tokens"),
            "tokens_share": (placeholders.sum() / pl.sum("count"), "share"),
            "rows": (((placeholders > 0) | (tails > 0)).sum(), "rows"),
            "equal_tails": (tails.sum().cast(pl.Int64), "rows"),
            "weight_share": (pl.sum("placeholder_weights") / pl.sum("weights"), "share"),
            "zero_share": (pl.sum("zeros") / pl.sum("sampled"), "share"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Rows with most placeholders."""
        return table.with_columns(value="found")

    def note(self, place: Mapping[str, Any]) -> str:
        """Both log-probs of the first."""
        return (
            f"log-probs {place['sampler']:.4g} of the sampler and {place['trainer']:.4g} of the trainer at token "
            f"{int(place['first'])}"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Nothing to compare."""
        if run.table["count"].sum():
            return None
        return Missing(
            ("no trained token has a log-prob from both sampler and trainer"),
            "record the sampler's log-probs for trained tokens",
        )

    def _kinds(self, run: Measured) -> dict[str, float]:
        """Placeholders that occur often enough, and to which no certain model leads."""
        counts = run.table.select(pl.sum(*PLACEHOLDERS, *CERTAIN)).to_dicts()[0]
        return {
            name: counts[name]
            for name in PLACEHOLDERS
            if counts[name] >= self.least_tokens
            and not (name.endswith(":0.0") and counts[name] < 3 * counts[name.replace("0.0", "certain")])
        }

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error for sentinels, a warning for the others."""
        kinds = self._kinds(run)
        tails = {side: int(run.table[name].sum()) for side, name in zip(SIDES, TAILS, strict=True)}
        tails = {side: rows for side, rows in tails.items() if rows >= self.least_tokens}
        if not kinds and not tails:
            return None
        parts = []
        for name, count in sorted(kinds.items(), key=lambda pair: -pair[1]):
            side, _, kind = name.partition(":")
            parts.append(f"{counted(count, 'log-prob')} of the {side} {'is' if count == 1 else 'are'} {kind}")
        parts += [f"{counted(rows, 'row')} end with equal {side} log-probs" for side, rows in tails.items()]
        impossible = any(name.partition(":")[2] in ("1.0", "-1000 or less") for name in kinds)
        total, rows, tokens = sum(kinds.values()), run.count("rows"), float(run.table["count"].sum())
        everywhere = run["zero_share"] or 0.0
        return Judgement(
            severity=Severity.ERROR if impossible else Severity.WARNING,
            confirmed=True,
            headline=(
                f"{counted(total, 'trained token')} in {counted(rows, 'row')} have a placeholder instead of a log-prob"
            )
            if kinds
            else f"{counted(sum(tails.values()), 'row')} end with one log-prob repeated",
            message=(
                f"{'; '.join(parts)}, while the other engine's log-prob is at least {APART:g} nats away; these tokens "
                f"carry {percent(run['weight_share'])} of the sum of importance weights"
            ),
            evidence="the values are in the file"
            + (
                f"; {percent(everywhere)} of the sampler's log-probs are exactly 0: greedy sampling, or log-probs "
                "were never recorded"
                if everywhere > 0.9
                else f"; {percent(total / tokens)} of the trained tokens, {number(total / rows)} a row"
            ),
            advice="record NaN where the engine returned no log-prob, and mask these tokens or set their ratio to 1",
        )

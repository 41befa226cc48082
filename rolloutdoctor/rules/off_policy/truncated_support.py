"""RDO004: the sampler's log-probs are those of a cut support."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, sampling_option
from rolloutdoctor.rules.measures.named_values import count, quantile, total, totals
from rolloutdoctor.rules.measures.slope_bins import common_factor, slopes_of
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

LIMITS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes of delta at which its two sides are compared, in nats."""


@dataclass(frozen=True)
class TruncatedSupport(TableRule):
    """The sampler's log-probs are renormalised over top-p, top-k or min-p, the trainer's over all tokens.

    ## What it does
    Looks whether the sampler's log-probs are above the trainer's on nearly all tokens, by a bounded amount.

    ## Why it matters
    An engine that samples only from the most likely tokens renormalizes their probabilities, so its log-probs are
    larger than the trainer's. Its log-probs are larger by -log of that mass, the importance ratio is too small by as
    much on every token, and a loss that is weighted or masked by it is too small, or gone: at top-p 0.8 upstream the
    mean ratio was 0.896 and 52 % of the tokens were off by a tenth; after the cut was replayed in the trainer, 1.001
    and 4 %. Tokens outside of the cut are never drawn, and their logits rise unseen.

    ## How it is measured
    On sampled tokens to which both models gave less than 0.9 (geometric mean). Found where at most a fourth of these
    have a larger log-prob from the trainer, and at some size of 0.02, 0.05, 0.1 or 0.2 nats at least 5 % are beyond it
    on the sampler's side and at most a tenth as many on the other, none (0.2 %) beyond half a nat, and 95 % of the
    differences are within 2 nats. `mean_weight`, the mean of exp(delta), is the mean mass that was kept: without a cut
    it is 1 whatever else the engine does, a temperature included. Not found where tokens of one context have another
    slope than 1 (`temperature-mismatch`), log-probs differ by one factor, or half of the sampler's are exactly 0
    (`logprob-placeholder`). A top-k cuts flat distributions alone, and leaves noise on the tokens of the others: up to
    half of the tokens may have a larger log-prob from the trainer where the mean weight is six standard errors below 1,
    and half as many be beyond a size on the other side where none are beyond half a nat. Recorded options do not rule
    it out: a sampler that cuts against a recorded top_p of 1 is what the log-probs show. Fills and stale weights leave
    the other tokens on both sides. Differences that are nearly the same size (95th percentile at most 2.5 medians) are
    those of top-p, else of top-k or min-p. Raw log-probs (vLLM's default) do not show a cut: see calibration at
    `temperature-mismatch`.

    ## What to do
    Sample from the full support (top_p 1, no top_k, no min_p), or score the trainer on the same kept tokens.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> old = [[-0.3 - 0.1 * place for place in range(16)]] * 64
    >>> batch = toy_batch([[0] * 8] * 8, lengths=16, policy=old, rollout=[[each + 0.1 for each in row] for row in old])
    >>> diagnose_one("RDO004", batch, trainer=None)
    'RDO004 warning exposed: mean_weight 0.9048'
    """

    code = "RDO004"
    name = "truncated-support"
    references = (
        "https://github.com/huggingface/trl/issues/6789",
        "https://github.com/huggingface/trl/pull/7269",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2601",
    )
    needs_objective = False
    splits = ("train",)
    needs = ("rollout_log_probs", "old_log_probs")

    least_tokens: int = 500
    least_share: float = 0.05
    most_above: float = 0.25
    """Half of the tokens are above the sampler's where only noise differs."""
    other_side: float = 0.1
    most_far: float = 0.002
    least_deviations: float = 6.0
    warn_below: float = 0.99
    """A mean weight that is 1 % too small is below what kernels differ by."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, version stamps, and what makes contexts."""
        prompts = {"prompt_ids"} if "prompt_ids" in context.columns else {"prompt"}
        stamps = {"policy_version_min", "policy_version_max"}
        return frozenset({"response_mask", "response_ids", "group_id", *stamps, *prompts})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sampled tokens, and the first ones of each row."""
        from rolloutdoctor.rules.measures.contexts import sampled_and_first_tokens

        return sampled_and_first_tokens(block)

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Count the two sides of each step."""
        import numpy as np

        from rolloutdoctor.ops.gap_bins import BINS, CENTRES, bins_of

        sample = steps.sample(self.code)
        if sample is None:
            return steps.nothing(dict)
        own, other = sample.squares
        unsure, apart = sample.tokens_by_step.at(sample.unsure), sample.apart[sample.unsure]
        below = np.flatnonzero(apart < 0)
        return steps.values(
            slope=steps.slopes(self.code),
            tokens=sample.tokens_by_step.size,
            weight=sample.weights,
            square=sample.tokens_by_step.sum(np.square(sample.weight)),
            own=own,
            other=other,
            product=sample.product,
            unsure=unsure.size,
            zeros=unsure.count(sample.sampler[sample.unsure] == 0),
            above=unsure.count(apart > 0),
            excess=(unsure.at(below).histogram(bins_of(-apart[below]), BINS), CENTRES),
            lower=(np.stack([unsure.count(apart < -limit) for limit in LIMITS], 1), LIMITS),
            higher=(np.stack([unsure.count(apart > limit) for limit in LIMITS], 1), LIMITS),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """The kept mass, and how one-sided delta is."""
        return {
            "mean_weight": (total("weight") / total("tokens"), "1"),
            "above_share": (total("above") / total("unsure"), "share"),
            "median_excess": (quantile("excess", 0.5), "nats"),
            "p95_excess": (quantile("excess", 0.95), "nats"),
            "unsure_tokens": (count("unsure"), "tokens"),
            "sampled_tokens": (count("tokens"), "tokens"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few tokens on which a cut could show."""
        unsure = run.count("unsure_tokens")
        if unsure >= self.least_tokens:
            return None
        return Missing(
            f"{counted(unsure, 'sampled token')} with a probability below 0.9; needs {self.least_tokens}",
            "widen --steps",
        )

    def _kept_by_chance(self, run: Measured) -> bool:
        """True unless the mean weight is below 1 beyond chance."""
        mean, (square, tokens) = run["mean_weight"], totals(run.table, "square", "tokens")
        if mean is None:
            return True
        return (1 - mean) * sqrt(tokens) < self.least_deviations * sqrt(max(square / tokens - mean**2, 0.0))

    def _beyond(self, run: Measured, limit: float) -> tuple[float, float]:
        """Unsure tokens that are further off than a limit: below and above."""
        return run.table.select(lower=total("lower", limit), higher=total("higher", limit)).row(0)

    def _limit(self, run: Measured) -> float | None:
        """Size at which the two sides differ most, if they differ as those of a cut support do."""
        most, other_side = self.most_above, self.other_side
        unsure, zeros, above = totals(run.table, "unsure", "zeros", "above")
        lower, higher = self._beyond(run, LIMITS[-1])
        if not self._kept_by_chance(run):
            most = 0.5
            # What a cut adds to noise is small, where it is not on nearly all tokens.
            other_side = 0.5 if lower <= self.most_far * unsure else other_side
        if unsure < self.least_tokens or 2 * zeros > unsure or above > most * unsure:
            return None
        high = run["p95_excess"]
        if higher > self.most_far * unsure or high is None or high > 2:
            return None
        slope = slopes_of(run.table)
        is_scaled = slope is not None and slope.is_scaled(0.02)
        if is_scaled or common_factor(*totals(run.table, "own", "other", "product")) is not None:
            return None
        found = []
        for limit in LIMITS[:-1]:
            below, above = self._beyond(run, limit)
            if below >= self.least_share * unsure and above <= other_side * below:
                found.append(limit)
        return found[-1] if found else None

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where the mean weight is off by a hundredth or more; confirmed where the run records a cut."""
        limit, kept = self._limit(run), run["mean_weight"]
        if limit is None or kept is None:
            return None
        middle, high = run["median_excess"] or 0.0, run["p95_excess"] or 0.0
        below, above = self._beyond(run, limit)
        options = {name: sampling_option(context, name) for name in ("top_p", "top_k", "min_p")}
        full = options["top_p"] == 1
        stated = [f"{name} = {value:g}" for name, value in options.items() if value and (name, value) != ("top_p", 1.0)]
        is_top_p = high <= 2.5 * middle
        kind = f"top-p of about {exp(-high):.2g}" if is_top_p else "top-k or min-p"
        return Judgement(
            severity=Severity.WARNING if kept < self.warn_below else Severity.INFO,
            confirmed=bool(stated),
            headline=(
                f"the sampler's log-probs are renormalized after truncated sampling ({kind}, {percent(kept)} of the "
                "mass kept)"
            ),
            message=(
                f"of {counted(run.count('unsure_tokens'), 'token')} with a probability below 0.9, "
                f"{percent(run['above_share'])} have a larger log-prob from the trainer than from the sampler, the "
                f"others a smaller one by {number(middle)} nats (median) and up to {number(high)} (95 %), as {kind} "
                f"causes; the mean importance ratio is {number(kept)}"
                + (
                    f"; the run records {', '.join(stated)}"
                    if stated
                    else "; the run records top_p = 1"
                    if full
                    else ""
                )
            ),
            evidence=(
                f"{int(below):,} tokens are below by more than {limit:g} nats and {int(above):,} above; sampling from "
                "the full vocabulary has mean 1"
            ),
            advice=(
                "sample with top_p = 1, top_k off and min_p = 0, or restrict the trainer's log-softmax to the tokens "
                "that the sampler kept"
            ),
        )

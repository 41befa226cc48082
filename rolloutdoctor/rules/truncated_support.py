"""RDO004: the sampler's log-probs are those of a cut support."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.ops.slope_bins import common_factor, slopes_of
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent, sampling_option

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

LIMITS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes of delta at which its two sides are compared, in nats."""

NAMES = tuple(map(str, LIMITS))


@dataclass(frozen=True)
class SupportTally(Sums):
    """What `truncated-support` adds up over the sampled tokens of both log-probs.

    Attributes:
        slopes: bin of the logarithm of a context's slope to contexts.
        tokens: tokens.
        weight: sum of their importance ratios.
        square: of the squares of these.
        own: sum of the squares of the sampler's log-probs.
        other: of the trainer's.
        product: of the products of both.
        unsure: tokens of which both models were less sure.
        zeros: those with a log-prob of exactly 0 from the sampler.
        above: those with a larger log-prob from the trainer.
        sizes: bin of the size of delta to tokens, where the sampler's is the larger.
        lower: limit to tokens below minus it.
        higher: limit to tokens above it.
    """

    slopes: Mapping[str, float] = by_name()
    tokens: int = 0
    weight: float = 0.0
    square: float = 0.0
    own: float = 0.0
    other: float = 0.0
    product: float = 0.0
    unsure: int = 0
    zeros: int = 0
    above: int = 0
    sizes: Mapping[str, float] = by_name()
    lower: Mapping[str, float] = by_name()
    higher: Mapping[str, float] = by_name()

    def beyond(self, limit: float) -> tuple[float, float]:
        """Unsure tokens that are further off than a limit: below and above."""
        return self.lower.get(str(limit), 0.0), self.higher.get(str(limit), 0.0)

    def quantile(self, share: float) -> float | None:
        """Quantile of the size of delta among unsure tokens to which the sampler gave more."""
        from rolloutdoctor.ops.gap_bins import BINS, quantile

        return quantile([self.sizes.get(str(place), 0.0) for place in range(BINS)], share)


@dataclass(frozen=True)
class TruncatedSupport(Rule[SupportTally]):
    """The sampler's log-probs are renormalised over top-p, top-k or min-p, the trainer's over all tokens.

    ## What it does
    Looks whether the sampler's log-probs are above the trainer's on nearly all tokens, by a bounded amount.

    ## Why it matters
    An engine that samples from the most likely tokens divides by their mass. Its log-probs are larger by -log of that
    mass, the importance ratio is too small by as much on every token, and a loss that is weighted or masked by it is
    too small, or gone: at top-p 0.8 upstream the mean ratio was 0.896 and 52 % of the tokens were off by a tenth; after
    the cut was replayed in the trainer, 1.001 and 4 %. Tokens outside of the cut are never drawn, and their logits rise
    unseen.

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
    tally = SupportTally
    needs_objective = False
    splits = ("train",)

    least_tokens: int = 500
    least_share: float = 0.05
    most_above: float = 0.25
    """Half of the tokens are above the sampler's where only noise differs."""
    other_side: float = 0.1
    most_far: float = 0.002
    least_deviations: float = 6.0
    warn_below: float = 0.99
    """A mean weight that is 1 % too small is below what kernels differ by."""

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs."""
        return frozenset({"rollout_log_probs", "old_log_probs"})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask, version stamps, and what makes contexts."""
        prompts = {"prompt_ids"} if "prompt_ids" in context.columns else {"prompt"}
        stamps = {"policy_version_min", "policy_version_max"}
        return frozenset({"response_mask", "response_ids", "group_id", *stamps, *prompts})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Sampled tokens, and the first ones of each row."""
        from rolloutdoctor.evaluation.contexts import sampled_and_first_tokens

        return sampled_and_first_tokens(block)

    def measure_each(self, steps: "StepView") -> list[SupportTally]:
        """Count the two sides of each step."""
        import numpy as np

        from rolloutdoctor.ops.by_step import named_counts
        from rolloutdoctor.ops.gap_bins import BINS, bins_of

        sample = steps.sample(self.code)
        if sample is None:
            return steps.nothing(SupportTally)
        own, other = sample.squares
        unsure, apart = sample.tokens_by_step.at(sample.unsure), sample.apart[sample.unsure]
        below = np.flatnonzero(apart < 0)
        return steps.tallies(
            SupportTally,
            slopes=steps.slopes(self.code),
            tokens=sample.tokens_by_step.size,
            weight=sample.weights,
            square=sample.tokens_by_step.sum(np.square(sample.weight)),
            own=own,
            other=other,
            product=sample.product,
            unsure=unsure.size,
            zeros=unsure.count(sample.sampler[sample.unsure] == 0),
            above=unsure.count(apart > 0),
            sizes=named_counts(unsure.at(below).histogram(bins_of(-apart[below]), BINS)),
            lower=named_counts(np.stack([unsure.count(apart < -limit) for limit in LIMITS], 1), NAMES),
            higher=named_counts(np.stack([unsure.count(apart > limit) for limit in LIMITS], 1), NAMES),
        )

    def measures(self, tally: SupportTally) -> Mapping[str, Measure]:
        """The kept mass, and how one-sided delta is."""
        return {
            "mean_weight": Measure(ratio(tally.weight, tally.tokens), "1"),
            "above_share": Measure(ratio(tally.above, tally.unsure), "share"),
            "median_excess": Measure(tally.quantile(0.5), "nats"),
            "p95_excess": Measure(tally.quantile(0.95), "nats"),
            "unsure_tokens": Measure(tally.unsure, "tokens"),
            "sampled_tokens": Measure(tally.tokens, "tokens"),
        }

    def inconclusive_reason(self, run: SupportTally, context: Context) -> Missing | None:
        """Too few tokens on which a cut could show."""
        if run.unsure >= self.least_tokens:
            return None
        return Missing(
            f"{counted(run.unsure, 'sampled token')} with a probability below 0.9; needs {self.least_tokens}",
            "widen --steps",
        )

    def _kept_by_chance(self, run: SupportTally) -> bool:
        """True unless the mean weight is below 1 beyond chance."""
        mean, square = ratio(run.weight, run.tokens), ratio(run.square, run.tokens)
        if mean is None or square is None:
            return True
        return (1 - mean) * sqrt(run.tokens) < self.least_deviations * sqrt(max(square - mean**2, 0.0))

    def _limit(self, run: SupportTally) -> float | None:
        """Size at which the two sides differ most, if they differ as those of a cut support do."""
        most, other_side = self.most_above, self.other_side
        if not self._kept_by_chance(run):
            most = 0.5
            # What a cut adds to noise is small, where it is not on nearly all tokens.
            other_side = 0.5 if run.beyond(LIMITS[-1])[0] <= self.most_far * run.unsure else other_side
        if run.unsure < self.least_tokens or 2 * run.zeros > run.unsure or run.above > most * run.unsure:
            return None
        (_, far), high = run.beyond(LIMITS[-1]), run.quantile(0.95)
        if far > self.most_far * run.unsure or high is None or high > 2:
            return None
        slope = slopes_of(run.slopes)
        is_scaled = slope is not None and slope.is_scaled(0.02)
        if is_scaled or common_factor(run.own, run.other, run.product) is not None:
            return None
        found = []
        for limit in LIMITS[:-1]:
            below, above = run.beyond(limit)
            if below >= self.least_share * run.unsure and above <= other_side * below:
                found.append(limit)
        return found[-1] if found else None

    def judge(self, run: SupportTally, context: Context) -> Judgement | None:
        """A warning where the mean weight is off by a hundredth or more; confirmed where the run records a cut."""
        limit, kept = self._limit(run), ratio(run.weight, run.tokens)
        if limit is None or kept is None:
            return None
        middle, high = run.quantile(0.5) or 0.0, run.quantile(0.95) or 0.0
        below, above = run.beyond(limit)
        options = {name: sampling_option(context, name) for name in ("top_p", "top_k", "min_p")}
        full = options["top_p"] == 1
        stated = [f"{name} = {value:g}" for name, value in options.items() if value and (name, value) != ("top_p", 1.0)]
        is_top_p = high <= 2.5 * middle
        kind = f"top-p of about {exp(-high):.2g}" if is_top_p else "top-k or min-p"
        return Judgement(
            severity=Severity.WARNING if kept < self.warn_below else Severity.INFO,
            confirmed=bool(stated),
            headline=f"the sampler's log-probs are those of a cut support: {kind}, {percent(kept)} of the mass kept",
            message=(
                f"of {counted(run.unsure, 'token')} with a probability below 0.9, {percent(run.above / run.unsure)} "
                "have "
                f"a larger log-prob from the trainer than from the sampler, the others a smaller one by "
                f"{number(middle)} nats (median) and up to {number(high)} (95 %), as {kind} makes it; importance "
                "ratios "
                f"have mean {number(kept)}"
                + (
                    f"; the run records {', '.join(stated)}"
                    if stated
                    else "; the run records top_p = 1"
                    if full
                    else ""
                )
            ),
            evidence=(
                f"{int(below):,} tokens are below by more than {limit:g} nats, {int(above):,} above; an engine with "
                "the full support has mean 1"
            ),
            advice="sample from the full support, or score the trainer on the tokens that the sampler kept",
        )

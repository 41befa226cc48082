"""RDO004: the sampler's log-probs are those of a cut support."""

from collections.abc import Mapping, Sequence
from math import copysign, exp, inf, sqrt
from typing import TYPE_CHECKING, Any

from rolloutdoctor.results.exact import ratio
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent, sampling_option, too_few
from rolloutdoctor.rules.measures.named_values import count, quantile, total, totals
from rolloutdoctor.rules.measures.slope_bins import common_factor, slopes_of
from rolloutdoctor.rules.sampled_tokens import SampledTokens
from rolloutdoctor.rules.table_rule import Measured, Quantity

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

LIMITS = (0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes of delta at which its two sides are compared, in nats."""

SAMPLER, TRAINER = "", "_back"
"""Whose log-probs are those of a cut support: the end of the names of what is measured with delta one way and back."""

WHOLE = {SAMPLER: "", TRAINER: ", those of the sampler are not"}
ADVICE = {
    SAMPLER: "sample with top_p = 1, top_k off and min_p = 0, or restrict the trainer's log-softmax to the tokens that "
    "the sampler kept",
    TRAINER: "have the engine log the probabilities that it samples with, or take the trainer's log-softmax over all "
    "tokens",
}


class TruncatedSupport(SampledTokens):
    """The sampler's log-probs are renormalised over top-p, top-k or min-p, the trainer's over all tokens; or back.

    ## What it does
    Checks whether the sampler's log-probs are above the trainer's on nearly all tokens, by a bounded amount, or the
    trainer's above the sampler's.

    ## Why it matters
    An engine that samples only from the most likely tokens renormalizes their probabilities, so its log-probs exceed
    the trainer's by -log of the kept mass. The log-ratio is too small by as much on every token, and a loss that
    is weighted or masked by it is too small, or gone: at top-p 0.8 upstream the mean ratio was 0.896 and 52 % of the
    tokens were off by a tenth; after the cut was replayed in the trainer, 1.001 and 4 %. Tokens outside of the cut are
    never drawn, and their logits rise unseen.

    ## How it is measured
    Sampled tokens to which both models gave less than 0.9 (geometric mean) are compared, 500 or more. A finding
    requires that at most a fourth of these have a larger log-prob from the trainer; that at some size of 0.02, 0.05,
    0.1 or 0.2 nats at least 5 % are beyond it on the sampler's side and at most a tenth as many on the other, none (0.2
    %) beyond half a nat; and that 95 % of the differences are within 2 nats. `mean_weight`, the mean of exp(delta), is
    the mean mass that was kept: without a cut it is 1 whatever else the engine does, a temperature included. It is a
    warning below 0.99, information above; confirmed if the run records a cut. Not found if tokens of one context have a
    slope other than 1 (`temperature-mismatch`), log-probs differ by one factor, or half of the sampler's are exactly 0
    (`logprob-placeholder`). A top-k cuts only flat distributions, and leaves noise on the tokens of the others: up to
    half of the tokens may have a larger log-prob from the trainer if the mean weight is six standard errors below 1,
    and half as many be beyond a size on the other side if none are beyond half a nat. Recorded options do not rule it
    out: a sampler that cuts against a recorded top_p of 1 is what the log-probs show. Placeholders and stale weights
    leave the other tokens on both sides. Differences of nearly the same size (95th percentile at most 2.5 medians) are
    those of top-p, others of top-k or min-p. Raw log-probs (vLLM's default) do not show a cut: see calibration at
    `temperature-mismatch`. A trainer that renormalises over the kept tokens, beside an engine that logs raw log-probs,
    has the other sign: there the mean of exp(delta) has to be six standard errors above 1, which no policy can reach on
    tokens that were drawn with the logged probabilities, and the mass is the mean of exp(-delta).

    ## What to do
    Sample from the full support (top_p 1, no top_k, no min_p), or score both on the same kept tokens.

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

    least_tokens: int = 500
    least_share: float = 0.05
    most_above: float = 0.25
    """Half of the tokens are above the sampler's where only noise differs."""
    other_side: float = 0.1
    most_far: float = 0.002
    least_deviations: float = 6.0
    warn_below: float = 0.99
    """A mean weight that is 1 % too small is below what kernels differ by."""

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Count the two sides of each step."""
        import numpy as np

        from rolloutdoctor.ops.gap_bins import BINS, CENTRES, bins_of

        sample = steps.sample()
        if sample is None:
            return steps.nothing(dict)
        sampler_sq, trainer_sq = sample.squares
        unsure, apart = sample.tokens_by_step.at(sample.unsure), sample.apart[sample.unsure]
        inverse = 1 / sample.weight
        measures: dict[str, Any] = {"weight_back": sample.tokens_by_step.sum(inverse)}
        for side, gap in ((SAMPLER, apart), (TRAINER, -apart)):
            below = np.flatnonzero(gap < 0)
            measures[f"above{side}"] = unsure.count(gap > 0)
            measures[f"excess{side}"] = (unsure.at(below).histogram(bins_of(-gap[below]), BINS), CENTRES)
            measures[f"lower{side}"] = (np.stack([unsure.count(gap < -limit) for limit in LIMITS], 1), LIMITS)
        return steps.values(
            slope=steps.slopes(self.code),
            tokens=sample.tokens_by_step.size,
            weight=sample.weights,
            square=sample.tokens_by_step.sum(np.square(sample.weight)),
            own=sampler_sq,
            other=trainer_sq,
            product=sample.product,
            unsure=unsure.size,
            zeros=unsure.count(sample.sampler[sample.unsure] == 0),
            **measures,
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """The kept mass, and how one-sided delta is."""
        return {
            "mean_weight": (total("weight") / total("tokens"), "1"),
            "above_share": (total("above") / total("unsure"), "share"),
            "median_excess": (quantile("excess", 0.5), "nats"),
            "p95_excess": (quantile("excess", 0.95), "nats"),
            "mean_inverse_weight": (total("weight_back") / total("tokens"), "1"),
            "median_excess_back": (quantile("excess_back", 0.5), "nats"),
            "p95_excess_back": (quantile("excess_back", 0.95), "nats"),
            "unsure_tokens": (count("unsure"), "tokens"),
            "sampled_tokens": (count("tokens"), "tokens"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few tokens on which a cut could show."""
        of = "with a probability below 0.9"
        return too_few(run.count("unsure_tokens"), "sampled token", of, self.least_tokens)

    def _deviations(self, run: Measured) -> float:
        """How many standard errors the mean weight is above 1."""
        mean, (square, tokens) = run["mean_weight"], totals(run.table, "square", "tokens")
        if mean is None or mean == 1:
            return 0.0
        spread = sqrt(max(square / tokens - mean**2, 0.0))
        return (mean - 1) * sqrt(tokens) / spread if spread else copysign(inf, mean - 1)

    def _beyond(self, run: Measured, limit: float, side: str) -> tuple[float, float]:
        """Unsure tokens that are further off than a limit: on the side of the cut, and on the other."""
        back = SAMPLER if side == TRAINER else TRAINER
        return run.table.select(own=total(f"lower{side}", limit), other=total(f"lower{back}", limit)).row(0)

    def _limit(self, run: Measured, side: str) -> float | None:
        """Size at which the two sides differ most, if they differ as those of a cut support do."""
        most, other_side, deviations = self.most_above, self.other_side, self._deviations(run)
        unsure, zeros, above = totals(run.table, "unsure", "zeros", f"above{side}")
        lower, higher = self._beyond(run, LIMITS[-1], side)
        if side == TRAINER and deviations < self.least_deviations:
            return None
        if side == SAMPLER and deviations <= -self.least_deviations:
            most = 0.5
            # What a cut adds to noise is small, where it is not on nearly all tokens.
            other_side = 0.5 if lower <= self.most_far * unsure else other_side
        if unsure < self.least_tokens or 2 * zeros > unsure or above > most * unsure:
            return None
        high = run[f"p95_excess{side}"]
        if higher > self.most_far * unsure or high is None or high > 2:
            return None
        slope = slopes_of(run.table)
        is_scaled = slope is not None and slope.is_scaled(0.02)
        if is_scaled or common_factor(*totals(run.table, "own", "other", "product")) is not None:
            return None
        limits = []
        for limit in LIMITS[:-1]:
            below, above = self._beyond(run, limit, side)
            if below >= self.least_share * unsure and above <= other_side * below:
                limits.append(limit)
        return limits[-1] if limits else None

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where the mean mass is off by a hundredth or more; confirmed where the run records a cut."""
        return self._of(run, context, SAMPLER) or self._of(run, context, TRAINER)

    def _of(self, run: Measured, context: Context, side: str) -> Judgement | None:
        limit, weight = self._limit(run, side), run["mean_weight" if side == SAMPLER else "mean_inverse_weight"]
        if limit is None or weight is None:
            return None
        cut, uncut = ("sampler", "trainer") if side == SAMPLER else ("trainer", "sampler")
        middle, high = run[f"median_excess{side}"] or 0.0, run[f"p95_excess{side}"] or 0.0
        below, above = self._beyond(run, limit, side)
        options = {name: sampling_option(context, name) for name in ("top_p", "top_k", "min_p")}
        full = options["top_p"] == 1
        stated = [f"{name} = {value:g}" for name, value in options.items() if value and (name, value) != ("top_p", 1.0)]
        is_top_p = high <= 2.5 * middle
        kind = f"top-p of about {exp(-high):.2g}" if is_top_p else "top-k or min-p"
        return Judgement(
            severity=Severity.WARNING if weight < self.warn_below else Severity.INFO,
            confirmed=bool(stated),
            headline=(
                f"the {cut}'s log-probs are renormalized after truncated sampling ({kind}, {percent(weight)} of the "
                f"mass kept){WHOLE[side]}"
            ),
            message=(
                f"of {counted(run.count('unsure_tokens'), 'token')} with a probability below 0.9, "
                f"{percent(ratio(*totals(run.table, f'above{side}', 'unsure')))} have a larger log-prob from the "
                f"{uncut} than from the {cut}, the others a smaller one by {number(middle)} nats (median) and up to "
                f"{number(high)} (95 %), as {kind} causes; the mean importance ratio is {number(run['mean_weight'])}"
                + (
                    f"; the run records {', '.join(stated)}"
                    if stated
                    else "; the run records top_p = 1"
                    if full
                    else ""
                )
            ),
            evidence=(
                f"{int(below):,} tokens are beyond {limit:g} nats on the {cut}'s side and {int(above):,} on the other; "
                "sampling from the full vocabulary has mean 1"
            ),
            advice=ADVICE[side],
        )

"""RDO008: a difference of sampler and trainer that looks like other experts of a mixture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.ops.slope_bins import slopes_of
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number, percent
from rolloutdoctor.rules.sampler_mismatch import APART, SURE, SamplerMismatch

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class RoutingTally(Sums):
    """What `moe-routing` adds up over sampled tokens that neither model was sure of.

    Attributes:
        slopes: bin of the logarithm of a context's slope to contexts.
        tokens: tokens.
        sizes: bin of the size of delta over 1 - p to tokens.
        tail: tokens far beyond the median of their step.
        above: those with a larger log-prob from the trainer.
        sure: those that the sampler was sure of and the trainer was not, as `sampler-mismatch` defines it.
        pairs: adjacent tokens that are both far beyond.
        expected: how many there would be if such tokens were anywhere in their row.
    """

    slopes: Mapping[str, float] = by_name()
    tokens: int = 0
    sizes: Mapping[str, float] = by_name()
    tail: int = 0
    above: int = 0
    sure: int = 0
    pairs: int = 0
    expected: float = 0.0

    def quantile(self, share: float) -> float | None:
        """Quantile of the size of delta over 1 - p."""
        from rolloutdoctor.ops.gap_bins import BINS, quantile

        return quantile([self.sizes.get(str(place), 0.0) for place in range(BINS)], share)


@dataclass(frozen=True)
class MoeRouting(Rule[RoutingTally]):
    """A hint that sampler and trainer route tokens to different experts.

    ## What it does
    Describes how sampler and trainer differ, and says where it looks like routers that choose other experts for some
    tokens: a heavy tail on both sides, in bursts.

    ## Why it matters
    In a mixture of experts a rounding error can send a token through another expert. Upstream about 10 % of the routers
    differed and 94 % of the tokens in one layer or more; runs collapsed, and replaying the routes mended it.

    ## How it is measured
    Noise of a kernel moves a log-prob by its size times 1 - p, so that delta over 1 - p has about the same spread on
    all tokens: normal noise has a 99th percentile of four medians. A hint is given where it has `tail_ratio` = 12 or
    more, 35 to 65 % of the tokens beyond six medians are on either side, these follow each other at least twice as
    often as by chance within their row (or a quarter more often, by 3.5 standard deviations of that count: where a
    fifth of the tokens is far off they cannot follow each other twice as often), and tokens of one context have slope
    1. Placeholders, stale weights and cut supports are one-sided, a temperature has no tail, rows of other weights
    differ as a whole.

    It is a hint and never confirmed: information, and a warning where three tokens or more of the tail are ones that
    the sampler was sure of and the trainer finds unlikely (`sampler-mismatch`). No column says which experts a token
    went through, the thresholds come from a synthetic model, and a kernel whose noise comes in bursts would look the
    same. That nothing was seen does not say that the routes agree, so this rule is never clean: it gives the hint, or
    cannot tell.

    ## What to do
    If the model is a mixture of experts, replay the sampler's routes in the trainer (R3), and see whether the tail
    goes.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDO008", toy_batch([[1, 0]], rollout=-1.01), trainer=None)
    'RDO008 skipped: 8 sampled tokens with a probability below 0.9; needs 2000'
    """

    code = "RDO008"
    name = "moe-routing"
    references = (
        "https://github.com/NVIDIA/Megatron-LM/issues/4168",
        "https://github.com/radixark/miles/pull/2722",
    )
    tally = RoutingTally
    needs_objective = False
    splits = ("train",)

    least_tokens: int = 2000
    tail_ratio: float = 12.0
    """Three times that of normal noise; bf16 logits have eight."""
    least_tail: float = 0.005
    bursts: float = 2.0
    some_bursts: float = 1.25
    """Enough where the count of neighbours is `beyond_chance` standard deviations above what is expected."""
    beyond_chance: float = 3.5

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

    def measure_each(self, steps: "StepView") -> list[RoutingTally]:
        """Count the tail of each step."""
        import numpy as np

        from rolloutdoctor.ops.by_step import named_counts
        from rolloutdoctor.ops.gap_bins import BINS, bins_of, medians

        sample = steps.sample(self.code)
        if sample is None:
            return steps.nothing(RoutingTally)
        fresh_N, at = steps.fresh_N, sample.unsure
        if fresh_N is not None:
            at = at[sample.runs.spread(fresh_N.cpu().numpy()[sample.row])[at]]
        if not len(at):
            return steps.nothing(RoutingTally)
        tokens, rows = sample.tokens_by_step.at(at), sample.runs.at(at)
        scaled = sample.apart[at] / (1 - np.exp((sample.sampler[at] + sample.trainer[at]) / 2))
        size = abs(scaled)
        bins = bins_of(size)
        counts = tokens.histogram(bins, BINS)
        is_far = size > tokens.runs.spread(6 * medians(size, bins, counts, tokens))
        is_sure = (sample.sampler[at] >= SURE) & (sample.sampler[at] < 0)
        # Pairs are adjacent tokens of one row; each is where its first token is.
        is_pair = np.diff(at, append=-1) == 1
        is_pair[rows.cuts[1:] - 1] = False
        is_followed = np.append(is_far[1:], False)
        ahead, behind, both = (rows.sums(x) for x in (is_pair & is_far, is_pair & is_followed, is_pair))
        return steps.tallies(
            RoutingTally,
            slopes=[
                of_step if count else {} for of_step, count in zip(steps.slopes(self.code), tokens.size, strict=True)
            ],
            tokens=tokens.size,
            sizes=named_counts(counts),
            tail=tokens.count(is_far),
            above=tokens.count(is_far & (scaled > 0)),
            sure=tokens.count(is_far & (sample.apart[at] <= -APART) & is_sure),
            pairs=tokens.count(is_pair & is_far & is_followed),
            expected=sample.by_step.sum(ahead * behind / np.maximum(both, 1)),
        )

    def measures(self, tally: RoutingTally) -> Mapping[str, Measure]:
        """The tail, its sides and its bursts."""
        middle, high = tally.quantile(0.5), tally.quantile(0.99)
        return {
            "tail_ratio": Measure(None if middle is None or high is None else ratio(high, middle), "1"),
            "tail_share": Measure(ratio(tally.tail, tally.tokens), "share"),
            "above_share": Measure(ratio(tally.above, tally.tail), "share"),
            "sure_tokens": Measure(tally.sure, "tokens"),
            "burst_ratio": Measure(ratio(tally.pairs, tally.expected), "1"),
            "unsure_tokens": Measure(tally.tokens, "tokens"),
        }

    def _is_seen(self, run: RoutingTally) -> bool:
        found = {name: measure.value or 0.0 for name, measure in self.measures(run).items()}
        slope = slopes_of(run.slopes)
        return (
            run.tokens >= self.least_tokens
            and found["tail_ratio"] >= self.tail_ratio
            and found["tail_share"] >= self.least_tail
            and 0.35 <= found["above_share"] <= 0.65
            and self._in_bursts(run)
            and (slope is None or abs(slope.middle - 1) < 0.05)
        )

    def _in_bursts(self, run: RoutingTally) -> bool:
        """Whether tokens far off follow each other: of rare neighbours the count is nearly a Poisson one."""
        if run.pairs >= self.bursts * run.expected > 0:
            return True
        score = (run.pairs - run.expected) / max(run.expected, 1.0) ** 0.5
        return run.pairs >= self.some_bursts * run.expected > 0 and score >= self.beyond_chance

    def inconclusive_reason(self, run: RoutingTally, context: Context) -> Missing | None:
        """Rows without the hint do not say that the routes agree."""
        if self._is_seen(run):
            return None
        if run.tokens < self.least_tokens:
            return Missing(
                f"{counted(run.tokens, 'sampled token')} with a probability below 0.9; needs {self.least_tokens}",
                "widen --steps",
            )
        return Missing(
            "the differences of sampler and trainer have no heavy tail in bursts, which does not say that routes agree",
            "no column holds routes: if the model is a mixture of experts, compare them in the trainer",
        )

    def judge(self, run: RoutingTally, context: Context) -> Judgement | None:
        """Information: a hint; a warning where the tail holds tokens that the sampler alone was sure of."""
        if not self._is_seen(run):
            return None
        found = {name: measure.value for name, measure in self.measures(run).items()}
        return Judgement(
            severity=Severity.WARNING if run.sure >= SamplerMismatch.least_places else Severity.INFO,
            confirmed=False,
            headline=f"{percent(found['tail_share'])} of the tokens differ far more than the others, on both sides "
            "and in "
            "bursts: other experts of a mixture?",
            message=(
                f"delta over 1 - p has a 99th percentile of {number(found['tail_ratio'])} medians (four for normal "
                "noise); "
                f"{percent(found['above_share'])} of the tokens beyond six medians have a larger log-prob from the "
                f"trainer, and they follow each other {number(found['burst_ratio'])} times as often as by chance"
            ),
            evidence="a hint alone: no column says which experts a token went through, and noise in bursts looks "
            "the same",
            advice="if the model is a mixture of experts, replay the sampler's routes in the trainer and compare",
        )

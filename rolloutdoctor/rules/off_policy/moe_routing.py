"""RDO008: a difference of sampler and trainer that looks like other experts of a mixture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, number, percent, too_few
from rolloutdoctor.rules.measures.named_values import count, quantile, total, totals
from rolloutdoctor.rules.measures.slope_bins import slopes_of
from rolloutdoctor.rules.measures.weight_sums import APART, SURE
from rolloutdoctor.rules.off_policy.sampler_mismatch import SamplerMismatch
from rolloutdoctor.rules.sampled_tokens import SampledTokens
from rolloutdoctor.rules.table_rule import Measured, Quantity

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


class MoeRouting(SampledTokens):
    """A hint that sampler and trainer route tokens to different experts.

    ## What it does
    Describes how sampler and trainer differ, and says where it looks like routers that choose other experts for some
    tokens: a heavy tail on both sides, in bursts.

    ## Why it matters
    In a mixture of experts a rounding error can route a token to another expert, which changes its log-prob by far more
    than rounding. Upstream about 10 % of the routers differed and 94 % of the tokens in one layer or more; runs
    collapsed, and replaying the routes fixed it.

    ## How it is measured
    Kernel noise moves a log-prob by its size times 1 - p, so delta / (1 - p) has about the same spread on all tokens:
    normal noise has a 99th percentile of four medians. From 2,000 sampled tokens below probability 0.9 it gives a hint
    if this `tail_ratio` is 12 or more, at least 0.5 % of the tokens are beyond six medians, 35 to 65 % of these are on
    either side, they follow each other at least twice as often as by chance within their row (or a quarter more often,
    by 3.5 standard deviations of that count: if a fifth of the tokens is far off they cannot follow each other twice as
    often), and tokens of one context have slope 1. Placeholders, stale weights and truncated supports are one-sided, a
    temperature has no tail, and rows of other weights differ as a whole.

    It is a hint and never confirmed: information, and a warning if the sampler was sure of at least three tokens of the
    tail that the trainer finds unlikely (`sampler-mismatch`). No column says which experts a token went through, the
    thresholds come from a synthetic model, and a kernel whose noise comes in bursts would look the same. That nothing
    was seen does not say that the routes agree, so this rule is never clean: it gives the hint, or cannot tell.

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

    least_tokens: int = 2000
    tail_ratio: float = 12.0
    """Three times that of normal noise; bf16 logits have eight."""
    least_tail: float = 0.005
    bursts: float = 2.0
    some_bursts: float = 1.25
    """Enough where the count of neighbours is `beyond_chance` standard deviations above what is expected."""
    beyond_chance: float = 3.5

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Count the tail of each step."""
        import numpy as np

        from rolloutdoctor.ops.gap_bins import BINS, CENTRES, bins_of, medians

        sample = steps.sample()
        if sample is None:
            return steps.nothing(dict)
        fresh_N, at = steps.fresh_N, sample.unsure
        if fresh_N is not None:
            at = at[sample.runs.spread(fresh_N.cpu().numpy()[sample.row])[at]]
        if not len(at):
            return steps.nothing(dict)
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
        slopes, keys = steps.slopes(self.code)
        return steps.values(
            slope=(np.where(tokens.size[:, None] > 0, slopes, 0), keys),
            tokens=tokens.size,
            size=(counts, CENTRES),
            tail=tokens.count(is_far),
            above=tokens.count(is_far & (scaled > 0)),
            sure=tokens.count(is_far & (sample.apart[at] <= -APART) & is_sure),
            pairs=tokens.count(is_pair & is_far & is_followed),
            expected=sample.by_step.sum(ahead * behind / np.maximum(both, 1)),
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """The tail, its sides and its bursts."""
        return {
            "tail_ratio": (quantile("size", 0.99) / quantile("size", 0.5), "1"),
            "tail_share": (total("tail") / total("tokens"), "share"),
            "above_share": (total("above") / total("tail"), "share"),
            "sure_tokens": (count("sure"), "tokens"),
            "burst_ratio": (total("pairs") / total("expected"), "1"),
            "unsure_tokens": (count("tokens"), "tokens"),
        }

    def _is_seen(self, run: Measured) -> bool:
        slope = slopes_of(run.table)
        return (
            run.count("unsure_tokens") >= self.least_tokens
            and (run["tail_ratio"] or 0.0) >= self.tail_ratio
            and (run["tail_share"] or 0.0) >= self.least_tail
            and 0.35 <= (run["above_share"] or 0.0) <= 0.65
            and self._in_bursts(run)
            and (slope is None or abs(slope.middle - 1) < 0.05)
        )

    def _in_bursts(self, run: Measured) -> bool:
        """Whether tokens far off follow each other: of rare neighbours the count is nearly a Poisson one."""
        pairs, expected = totals(run.table, "pairs", "expected")
        if pairs >= self.bursts * expected > 0:
            return True
        score = (pairs - expected) / max(expected, 1.0) ** 0.5
        return bool(pairs >= self.some_bursts * expected > 0 and score >= self.beyond_chance)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Rows without the hint do not say that the routes agree."""
        if self._is_seen(run):
            return None
        tokens = run.count("unsure_tokens")
        return too_few(tokens, "sampled token", "with a probability below 0.9", self.least_tokens) or Missing(
            "the mismatch has no bursts with a heavy tail, which does not prove that the routes agree",
            "compare the routes in the trainer if the model is an MoE: no column holds them",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: a hint; a warning where the tail holds tokens that the sampler alone was sure of."""
        if not self._is_seen(run):
            return None
        return Judgement(
            severity=Severity.WARNING if run.count("sure_tokens") >= SamplerMismatch.least_places else Severity.INFO,
            confirmed=False,
            headline=(
                f"{percent(run['tail_share'])} of the tokens have a far larger mismatch, in bursts and of both signs: "
                "different MoE experts?"
            ),
            message=(
                f"the 99th percentile of |log-ratio| / (1 - p) is {number(run['tail_ratio'])} medians (four for "
                f"normal noise); of the tokens beyond six medians {percent(run['above_share'])} have a larger "
                f"log-prob from the trainer, and they are adjacent {number(run['burst_ratio'])} times as often as by "
                "chance"
            ),
            evidence="only a hint: no column holds the experts of a token, and bursts of noise look the same",
            advice="replay the sampler's routing in the trainer (R3) and compare, if the model is an MoE",
        )

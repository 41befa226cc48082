"""RDO017: log-probs of the trainer that are exactly 0, where the sampler's are not."""

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock


class SoftmaxCollapse(TableRule):
    """The trainer's log-prob of tokens is exactly 0, although the sampler was not certain of them.

    ## What it does
    Counts trained tokens with a log-prob of exactly 0 from the trainer and a smaller one from the sampler.

    ## Why it matters
    The derivative of a log-prob by its logit is one minus the probability. Where the logit minus the log-sum of all
    rounds to 0 the probability is 1, and the token has no gradient: it can be neither reinforced nor unlearned, and a
    policy that made it likely stays there. In bfloat16 logits round that way from a probability of 0.99, in float32
    from 1 - 6e-8, which loses nothing.

    ## How it is measured
    `lost_share` is these tokens' share of the sum of 1 - p over all trained tokens, with p the sampler's probability.
    It is a warning from 1 %, with at least 50 such tokens. Tokens whose log-probs are 0.75 nats apart or more do not
    count: there the 0 stands for a log-prob that was never computed (`logprob-placeholder`). If tokens were sampled
    greedily, or from the top token alone, the sampler's are 0 too, and nothing is found. Confirmed: the columns hold
    both.

    ## What to do
    Compute the log-softmax in float32, from logits in float32; where the trainer has a form that keeps the digits of
    tokens near 1 (minus the softplus of the log-sum of the others less the logit), use that.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy = [[-0.7, 0.0, 0.0, 0.0]] * 40
    >>> rollout = [[-0.7, -0.02, -0.01, -0.01]] * 40
    >>> batch = toy_batch([[1, 0] * 20], lengths=4, policy=policy, rollout=rollout)
    >>> diagnose_one("RDO017", batch, trainer=None)
    'RDO017 warning confirmed: lost_share 0.0731'
    """

    code = "RDO017"
    name = "softmax-collapse"
    references = ("https://arxiv.org/abs/2501.04697",)
    reads = ("trained_tokens",)
    adds = ("zeros", "lost", "gradient")
    needs_objective = False
    splits = ("train",)
    needs = ("policy_log_probs", "rollout_log_probs", "response_mask")

    least_lost: float = 0.01
    """Share of the derivative by the logits that is told from what engines differ by."""
    fewest: int = 50
    """Tokens; fewer are single ones that an engine rounded."""
    apart: float = 0.75
    """Nats from which on a 0 is no rounding, as of `logprob-placeholder`."""

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count such tokens of each row, and add up 1 - p of them and of all."""
        from rolloutdoctor.ops.elementwise import is_above, is_below, is_equal, is_finite, kept

        sampler_T = block.of_trained(block.column("rollout_log_probs"))
        if not all(map(isfinite, block.extremes("rollout_log_probs"))):
            sampler_T = kept(sampler_T, is_finite(sampler_T))
        slope_T = sampler_T.clamp(max=0).expm1().abs_()
        zeros_n = lost_n = block.trained_n * 0
        # NaN is not below 0.
        if not block.extremes("policy_log_probs")[1] < 0:
            zero_T = is_equal(block.column("policy_log_probs"), 0.0) & is_below(sampler_T, 0.0)
            zero_T &= is_above(sampler_T, -self.apart)
            zeros_n, lost_n = block.row_sum(zero_T), block.row_sum(kept(slope_T, zero_T))
        return {"zeros": zeros_n, "lost": lost_n, "gradient": block.row_sum(slope_T)}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the responses of each step that have a trained token, and those that lose something."""
        rows = rows.filter(pl.col("trained_tokens") > 0)
        sums = rows.group_by(STEP_KEY, maintain_order=True).agg(pl.sum("trained_tokens", *self.adds))
        places = rows.select(*NAMES, value="lost", tokens="zeros", of="trained_tokens")
        return with_places(sums, places, context)

    def quantities(self) -> Mapping[str, Quantity]:
        """The share of the gradient that is lost, and the tokens."""
        return {
            "lost_share": (pl.when(pl.sum("gradient") > 0).then(pl.sum("lost") / pl.sum("gradient")), "share"),
            "zero_share": (pl.sum("zeros") / pl.sum("trained_tokens"), "share"),
            "zero_tokens": (pl.sum("zeros").cast(pl.Int64), "tokens"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the number of such tokens."""
        return f"{counted(place['tokens'], 'token')} of {place['of']:,} with a log-prob of exactly 0"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No token to compare."""
        return None if len(run.table) else "no token is trained"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, if the tokens hold a part of the gradient."""
        zeros, lost = run.count("zero_tokens"), run["lost_share"]
        if zeros < self.fewest or lost is None or lost < self.least_lost:
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=(
                f"{counted(zeros, 'trained token')} ({percent(run['zero_share'])}) have a log-prob of exactly 0 from "
                f"the trainer, and {percent(lost)} of the gradient by the sampler's probabilities"
            ),
            message=(
                "logits minus their log-sum round to 0 there, and a token of probability 1 has no gradient: it can "
                "neither be reinforced nor unlearned"
            ),
            evidence="the sampler's log-probs of the same tokens are below 0",
            advice="compute the log-softmax in float32 from logits in float32, or by the softplus of the other logits",
        )

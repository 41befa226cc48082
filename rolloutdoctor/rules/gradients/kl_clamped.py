"""RDG008: a clamp flattens the KL."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import COUNTED, CountedMeasured, RowCountingRule
from rolloutdoctor.rules.base import Context, Judgement, counted, percent

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

PAIR = ("ref_log_probs", "policy_log_probs")

LOW, HIGH = -2.6107, 10.99998
"""Policy minus reference where k3 is 10, the clamp of every trainer that clamps it, rounded outwards."""


class KlClamped(RowCountingRule):
    """A clamp cuts the KL of some tokens, and with it their gradient.

    ## What it does
    Where the recorded estimator does not reproduce the logged KL or loss, tries it with the clamps that trainers
    use: the log-ratio at 20, the KL at 10. Where the recorded estimator has such a clamp, counts the trained tokens
    beyond it.

    ## Why it matters
    A clamped token has no KL gradient: exactly where policy and reference differ most, nothing pulls the policy
    back.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the clamp that the log shows.

    k3 reaches 10 if the policy's log-prob is 2.61 nats below the reference's or 11.0 above it. It is reported if more
    than 0.1 % of the trained tokens are beyond that, a warning from three of them: at a usual KL of some hundredths of
    a nat no token is.

    ## What to do
    Look at the tokens at the clamp: a log-ratio of many nats is a wrong reference, a wrong token or a collapsed
    policy.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, 5.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDG008", batch, trainer="trl", beta=0.1, logged={"kl": 2.0372092796})
    'RDG008 error confirmed: values_compared 1'
    """

    code = "RDG008"
    name = "kl-clamped"
    references = ("https://github.com/volcengine/verl/issues/2928",)
    stages = ("kl", "loss")
    shown_by = frozenset({"kl", "kl_loss", "loss", "reward_kl", "stored_kl"})
    part_names = (
        Part.KL_LOSS,
        Part.KL_REWARD,
    )
    adds = COUNTED
    shows = "trained tokens beyond the clamp"

    most: float = 0.001
    fewest: int = 3

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and both models' log-probs."""
        return super().optional_columns(context) | {*PAIR, "response_mask"}

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the trained tokens whose k3 is above 10."""
        from rolloutdoctor.ops.elementwise import outside
        from rolloutdoctor.rules.measures.sampled_rows import gap_of

        gap = gap_of(block, PAIR)
        if gap is None:
            return {}
        # The extremes settle it for nearly every block.
        places = outside(gap.apart_T, LOW, HIGH) if gap.low < LOW or gap.high > HIGH else None
        return {"looked_at": gap.count_N, "shown": gap.count_N * 0 if places is None else block.runs.count(places)}

    def direct(self, run: CountedMeasured, context: Context) -> Judgement | None:
        """A warning where the recorded estimator clamps more than a few tokens; confirmed where the log follows."""
        if run.shown <= self.most * run.looked_at or not _clamps(context):
            return None
        return Judgement(
            severity=Severity.WARNING if run.shown >= self.fewest else Severity.INFO,
            confirmed=run.is_reproduced,
            headline=(
                f"{percent(run.shown / run.looked_at)} of the trained tokens exceed the KL clamp and get no KL gradient"
            ),
            message=(
                f"the KL is above 10 in {counted(run.shown, 'trained token')} of {run.looked_at:,}, where the clamp "
                "removes its gradient"
            ),
            evidence="the log-probs of policy and reference, and the recorded estimator",
            advice=(
                "inspect these tokens: a log-ratio of many nats means a wrong reference, a wrong token or a "
                "collapsed policy"
            ),
        )


def _clamps(context: Context) -> bool:
    """True if a KL of the objective is cut where k3 is 10."""
    objective = context.objective
    terms = () if objective is None else (None if objective.unknown_loss else objective.kl_loss, objective.kl_reward)
    clamped = ((term.estimator, term.clamp) for term in terms if term is not None and term.coef)
    return any(name == "k3_clamped" or (name == "k3" and clamp == 10) for name, clamp in clamped)

"""RDG007: the KL in the loss is another estimator."""

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement


class KlGradient(DirectRule):
    """The KL in the loss is not the estimator that is recorded, and its gradient is another one.

    ## What it does
    Where the recorded estimator does not reproduce the logged KL or loss, tries k1, k2, k3, the absolute log-ratio,
    with and without the importance ratio as weight, and of the policy's, the old and the sampler's log-probs. Where the
    options put k1 in the loss, not weighted by the importance ratio, says so as information.

    ## Why it matters
    The derivative of an estimator is not the gradient of the KL: as a loss, k1 has a gradient of 0 in expectation, k2
    that of the reverse KL and k3 that of the forward KL. A KL of the old log-probs has no gradient at all.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the estimator that the log shows.

    ## What to do
    Set the estimator that you mean, and compare the KL's gradient and not its value.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDG007", batch, trainer="trl", beta=0.1, logged={"kl": 0.0400000051})
    'RDG007 error confirmed: values_compared 1'
    """

    code = "RDG007"
    name = "kl-gradient"
    references = ("https://github.com/huggingface/trl/issues/4637",)
    stages = ("kl", "loss")
    shown_by = frozenset({"kl", "kl_loss", "loss", "reward_kl", "stored_kl"})
    part_names = (
        Part.KL_LOSS,
        Part.KL_REWARD,
    )

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Information where the options choose k1 as a loss."""
        term = None if context.objective is None else context.objective.kl_loss
        if (
            not run.steps
            or term is None
            or not term.coef
            or term.estimator != "k1"
            or term.straight_through
            or term.ratio_weighted
        ):
            return None
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline="the KL loss uses k1, whose gradient is zero in expectation",
            message=(
                "the derivative of k1 with respect to the policy's log-prob is 1 on every token, whatever the "
                "reference: on-policy its expectation is zero, so the term only adds noise"
            ),
            evidence="the options of the run",
            advice="use k2 (its gradient is that of the reverse KL) or k3 in the loss, or put k1 in the reward",
        )

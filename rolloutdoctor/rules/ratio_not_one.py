"""RDO006: the importance ratio compares other log-probs."""

from dataclasses import dataclass

from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class RatioNotOne(CauseRule):
    """The importance ratio in the loss is not that of the policy and the old log-probs.

    ## What it does
    Where the logged loss, clip fraction or drift does not follow from the log-probs in the file, tries a ratio of 1
    everywhere, and one against the sampler's log-probs.

    ## Why it matters
    A ratio that is 1 by accident turns off the clip: later inner steps then go as far as they like. A ratio that is
    not 1 at the first inner step clips tokens of an on-policy update.

    ## How it is measured
    Every logged loss and KL is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains and how far the gradient differs in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1, and the `cosine` of the two.

    ## What to do
    Compute the old log-probs once before the first update, with the kernels of the update, and keep them.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, old = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, old=old)
    >>> diagnose_one("RDO006", batch, trainer="trl", logged={"loss": -0.1414013591})
    'RDO006 error confirmed: values_compared 1'
    """

    code = "RDO006"
    name = "ratio-not-one"
    references = ("https://github.com/volcengine/verl/issues/6280",)
    stages = ("loss",)
    shown_by = frozenset({"loss", "policy_loss"})
    remedy = "log the loss and the KL of every optimiser step beside the run"

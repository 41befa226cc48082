"""RDI008: log-probs of a neighbouring token."""

from dataclasses import dataclass

from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class LogProbShift(CauseRule):
    """Log-probs are one token early or late.

    ## What it does
    Where a logged KL, loss or ratio does not follow from the log-probs in the file, tries the reference's and the
    old log-probs moved by one token within each row.

    ## Why it matters
    KL, ratio and clip then compare different tokens: ratios of 3 and more on every second token, and a KL that
    never falls.

    ## How it is measured
    Every logged loss and KL is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains and how far the gradient differs in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1, and the `cosine` of the two.

    ## What to do
    Align log-probs with the tokens they belong to: the logits at position t predict token t + 1.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDI008", batch, trainer="trl", beta=0.1, logged={"kl": 0.7457480582})
    'RDI008 error confirmed: values_compared 1'
    """

    code = "RDI008"
    name = "logprob-shift"
    references = ("https://github.com/modelscope/ms-swift/issues/8196",)
    stages = ("kl", "loss")
    remedy = "log the loss and the KL of every optimiser step beside the run"

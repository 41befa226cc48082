"""RDI008: log-probs of a neighbouring token."""

from rolloutdoctor.rules.audited import CauseRule


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
    """

    code = "RDI008"
    name = "logprob-shift"
    references = ("https://github.com/modelscope/ms-swift/issues/8196",)
    stages = ("kl", "loss")
    remedy = "log the loss and the KL of every optimiser step beside the run"

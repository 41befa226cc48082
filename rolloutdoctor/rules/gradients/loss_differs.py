"""RDG005: a logged loss or KL that nothing explains."""

from rolloutdoctor.rules.audited import DiffersRule


class LossDiffers(DiffersRule):
    """The logged loss or KL is not reproduced by the log-probs, the advantages and the recorded options.

    ## What it does
    Recomputes the loss, its parts and the KL as the trainer defines them, and compares them with the log. Where they
    disagree, every known cause is tried: another KL estimator, an aggregation by micro-batch, shifted log-probs, a KL
    that counts twice. What none of them explains is reported here, with its shape.

    ## Why it matters
    A loss that the rows do not reproduce means that the update used other rows or other options.

    ## How it is measured
    A value agrees if it differs by no more than its rounding radius, which is derived from its terms. If the value
    depends on `micro_batch_id` or `policy_log_probs` and the file lacks them, nothing is claimed.

    ## What to do
    Check that the rows are all rows of the step, and that the options are those of the run.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, 0], [0, 1]], ref=-1.3)
    >>> diagnose_one("RDG005", batch, trainer="trl", beta=0.1, logged={"loss": 0.7})
    'RDG005 error confirmed: values_compared 1'
    """

    code = "RDG005"
    name = "loss-differs"
    references = ("https://github.com/volcengine/verl/issues/906",)
    stages = ("kl", "loss")
    shown_by = frozenset({"kl", "kl_loss", "loss", "policy_loss", "reward_kl", "stored_kl"})
    shown_by_each = True
    what = "logged losses and KLs"

"""RDG008: a clamp flattens the KL."""

from dataclasses import dataclass

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.rules.audited import CauseRule


@dataclass(frozen=True)
class KlClamped(CauseRule):
    """A clamp cuts the KL of some tokens, and with it their gradient.

    ## What it does
    Where the logged KL or loss does not follow from the recorded estimator, tries it with the clamps that trainers
    use: the log-ratio at 20, the KL at 10.

    ## Why it matters
    A clamped token has no KL gradient: exactly where policy and reference differ most, nothing pulls the policy
    back.

    ## How it is measured
    Every logged loss and KL is held against both formulas, each within its rounding radius. The finding gives how
    many values each explains and how far the gradient differs in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1, and the `cosine` of the two.

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
    remedy = "log the loss and the KL of every optimiser step beside the run"
    part_names = (
        Part.KL_LOSS,
        Part.KL_REWARD,
    )

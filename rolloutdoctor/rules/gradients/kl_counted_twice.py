"""RDG009: the KL is in reward and loss."""

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement


class KlCountedTwice(DirectRule):
    """The KL counts twice: in the reward and in the loss, or twice in the loss.

    ## What it does
    Where the options do not reproduce the logged advantages or losses, tries a KL penalty in the reward beside
    the one in the loss, and a KL term that was added two times. Options that put a KL in both are a warning by
    themselves.

    ## Why it matters
    The penalty for leaving the reference is twice what the coefficient says, which misleads a sweep over the
    coefficient.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the objective that the log shows.

    ## What to do
    Keep one of the two.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDG009", batch, trainer="trl", beta=0.1, logged={"loss": -0.1337660063})
    'RDG009 error confirmed: values_compared 1'
    """

    code = "RDG009"
    name = "kl-counted-twice"
    references = (
        "https://github.com/OpenRLHF/OpenRLHF/issues/768",
        "https://github.com/volcengine/verl/issues/509",
    )
    stages = ("advantages", "kl", "loss")
    shown_by = frozenset({"advantages", "loss"})
    part_names = (Part.KL_LOSS,)

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """A warning where the options ask for both."""
        objective = context.objective
        if not run.steps or objective is None or objective.kl_loss is None or objective.kl_reward is None:
            return None
        in_loss, in_reward = objective.kl_loss.coef, objective.kl_reward.coef
        if not in_loss or not (in_reward or objective.kl_reward.coef_metric):
            return None
        weight = "an adaptive coefficient" if objective.kl_reward.coef_metric else f"coefficient {in_reward:g}"
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline="the KL penalty counts twice: the options put it in the reward and in the loss",
            message=(
                f"the KL loss has coefficient {in_loss:g} and the KL in the reward {weight}: both penalize distance "
                "from the reference"
            ),
            evidence="the options of the run",
            advice="keep one: set the KL coefficient of the reward or that of the loss to 0",
        )

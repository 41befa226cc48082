"""RDT015: the KL grows while the gradient vanishes: the KL term pulls on nothing, from the trainer's log alone."""

from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, kl_coefficient, number
from rolloutdoctor.rules.measures.negative_kl import negative_kl
from rolloutdoctor.rules.numbers_rule import NumbersRule, from_to, levels, series, step_at
from rolloutdoctor.rules.series import crossing, ends
from rolloutdoctor.rules.table_rule import Measured


class KlNotHeld(NumbersRule):
    """The KL from the reference is large, and the gradient norm is next to nothing.

    ## What it does
    Compares the logged KL and gradient norm at the end with those at the start.

    ## Why it matters
    A KL term pulls harder the further the policy is from the reference. A KL that is large while the gradient norm went
    to nearly 0 has no gradient: it is computed under `no_grad` or detached, or its coefficient is next to nothing.

    ## How it is measured
    Medians over the first and the last tenth of the logged steps, at least three, are compared. A finding is a KL that
    ends above 0.1 nats and five times its start, with a gradient norm that ends below a fiftieth of its start and an
    entropy, if it is logged, above a fifth of its start: a policy without entropy has no gradient either way. If half
    of the groups are zero-variance at the end, the policy term has next to no gradient, and the rule cannot tell. A
    warning, exposed. A stated coefficient of the KL term below 0, in a log with a KL, is a warning, too: it rewards the
    distance, and is confirmed where the trainer is known. `onset` is the first step from which the gradient norm stays
    below the geometric mean of both.

    ## What to do
    Compute the gradient of the KL term alone on one batch; look for `no_grad`, `detach` and the coefficient.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> kl, norm = [0.04 * step for step in range(20)], [1.0] * 8 + [0.001] * 12
    >>> diagnose_log("RDT015", kl=kl, grad_norm=norm)
    'RDT015 warning exposed: kl 0.38'
    """

    code = "RDT015"
    name = "kl-not-held"
    references = ("https://github.com/huggingface/trl/issues/4634",)
    about = ("kl", "grad_norm")
    beside = ("entropy", "zero_variance_share")

    large: float = 0.1
    times: float = 5.0
    vanishes: float = 0.02
    spent: float = 0.2
    dead: float = 0.5

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Groups without an advantage, whose policy term has no gradient."""
        reason, groups = super().inconclusive_reason(run, context), levels(run, "zero_variance_share")
        if reason is not None or negative_kl(run, context) is not None:
            return reason
        if groups is None or groups.last < self.dead or not self._has_vanished(run):
            return None
        return Missing("most groups are zero-variance at the end, so that the gradient vanishes with them", LONGER_LOG)

    def _has_vanished(self, run: Measured) -> bool:
        """Tell whether the KL grew while the gradient norm vanished, of a policy that has entropy left."""
        kl, norms, entropy = ends(series(run, "kl")), ends(series(run, "grad_norm")), levels(run, "entropy")
        grew = kl.last > max(self.large, self.times * max(kl.first, 0.0))
        is_spent = entropy is not None and entropy.last < self.spent * entropy.first
        return grew and norms.first > 0 and norms.last < self.vanishes * norms.first and not is_spent

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Read the stated coefficient: a line with a KL is enough."""
        return negative_kl(run, context)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Read the coefficient, and compare both ends."""
        if (judgement := negative_kl(run, context)) is not None:
            return judgement
        if not self._has_vanished(run):
            return None
        kl, norms = ends(series(run, "kl")), ends(series(run, "grad_norm"))
        at = crossing(series(run, "grad_norm"), (norms.first * max(norms.last, 1e-12)) ** 0.5, below=True)
        onset = step_at(run, len(run.table) - 1 if at is None else at)
        way = from_to(norms.first, norms.last)
        return Judgement(
            severity=Severity.WARNING,
            confirmed=False,
            headline=f"the KL grew to {number(kl.last)} nats while the gradient norm went {way}: the KL term has no "
            "gradient",
            message=f"The KL went {from_to(kl.first, kl.last)} nats and the gradient norm {way}: a KL term with a "
            "gradient would pull the harder.",
            evidence=f"medians over the first and the last {counted(kl.count, 'step')} of {len(run.table):,}",
            advice=f"check that the KL is not computed under no_grad or detached, and {kl_coefficient(context)}",
            measures={"kl_last": Measure(kl.last, "nats"), "onset": Measure(onset, "step")},
        )

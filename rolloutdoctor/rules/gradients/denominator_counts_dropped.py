"""RDG010: the denominator counts other tokens than the numerator."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.rules.known_fault import KnownFaultRule, of_fixes, shifts_of

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


FIXES = ("truncated-out-of-denominator:after-masks", "empty-rows-out-of-denominator:trained-tokens")


class DenominatorCountsDropped(KnownFaultRule):
    """The denominator of the loss counts tokens that are not trained, or leaves them out against the options.

    ## What it does
    Where the options do not reproduce the logged loss, tries a denominator that counts tokens before rejection,
    and one that counts them after it. Where the release itself counts tokens that were masked, or one token for each
    fully masked response (slime and miles with `calculate_per_token_loss`), says by how much the loss is smaller.

    ## Why it matters
    With rejected tokens in the denominator the update shrinks by their share, which differs from step to step. Some
    trainers keep them on purpose, so this is about what the options say.

    ## How it is measured
    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the denominator that the log shows. If the
    release itself counts such tokens, it is compared with the same objective under its fix: a warning, information if
    the gradient changes by at most a thousandth, and confirmed if a logged loss agrees with the objective as it is and
    differs from the fixed one by more than rounding. Clean: a loss was logged, and all of them agree with the recorded
    denominator; or the release counts such tokens and the run has none.

    ## What to do
    Decide which is meant, and state it.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> mask = [[1, 1, 1], [0, 0], [1, 1], [1, 0]]
    >>> batch = toy_batch([[1, 0], [0, 1]], mask=mask, per_token={"response_mask_pre": 1})
    >>> diagnose_one("RDG010", batch, trainer="verl", adv_estimator="grpo", logged={"actor/pg_loss": -0.157134618})
    'RDG010 error confirmed: values_compared 1'
    """

    code = "RDG010"
    name = "denominator-counts-dropped"
    references = ("https://github.com/huggingface/trl/issues/6369",)
    stages = ("loss",)
    shown_by = frozenset({"loss", "policy_loss"})
    absent = "no token was masked by rejection"
    fixes = FIXES
    reads = of_fixes(*FIXES)
    adds = shifts_of(*FIXES)

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Tell whether rejection masked a token of the step, and what tells the fixes apart."""
        batch, measures = step.batch, super().measure_step(step)
        if not {"response_mask", "response_mask_pre"} <= batch.per_token.keys():
            return {**measures, "occurs": len(batch) > 0}
        return {**measures, "occurs": bool((batch.column("response_mask_pre") & ~batch.column("response_mask")).any())}

"""RDA010: whitening with moments over other tokens than the trained ones."""

from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.known_fault import KnownFaultRule, of_fixes, shifts_of

FIX = "cp-whitening:whole"


class WhiteningOverPadding(KnownFaultRule):
    """Advantages are whitened over padding, over masked tokens, rank by rank, or slice by slice of the rows.

    ## What it does
    Where the objective whitens its advantages and the logged ones are not reproduced, tries other tokens for the mean
    and the variance: all response tokens, all positions of rows padded to the longest of the step, one moment over
    these and the other over the trained tokens, the tokens of each rank by itself, and the slices that each
    context-parallel rank has of the rows. slime does the last up to 0.3.1, and so does miles: such a run is evaluated
    with the fix `cp-whitening` as well.

    ## Why it matters
    A mean that counts padding is not the mean of the trained tokens: the difference pushes every token of the step in
    one direction. A variance that counts zeros is too small, and the step too large.

    ## How it is measured
    Every logged advantage is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains, how many rows change, how many advantages change sign (`sign_flips`), and with log-probs how
    far the gradients differ: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1 in log-prob space, with
    g_made for the moments that the log shows. Moments by rank need the column `rank`, those by slice `prompt_ids`. An
    objective that does not whiten is tested for whitening that no option asks for. Where the release whitens by slice
    it is a warning, confirmed if the logged advantages agree with the release and not with the fix. Clean: the logged
    advantages agree with moments over the trained tokens of the step.

    ## What to do
    Pass the loss mask to both the mean and the variance, and sum both over all ranks before dividing.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> made = [(3 - 1.5) / 3**0.5, (0 - 1.5) / 3**0.5]  # four positions: 3, 3, 0 and the masked 0
    >>> batch = toy_batch([[3], [0]], mask=[[1, 1], [1, 0]], per_row={"advantage": made})
    >>> diagnose_one("RDA010", batch, trainer="verl", adv_estimator="reinforce_plus_plus_baseline")
    'RDA010 error confirmed: values_compared 2'
    """

    code = "RDA010"
    name = "whitening-over-padding"
    references = (
        "https://github.com/NovaSky-AI/SkyRL/issues/1305",
        "https://github.com/volcengine/verl/issues/1527",
        "https://github.com/THUDM/slime/pull/2235",
    )
    fixes = (FIX,)
    reads = of_fixes(FIX)
    adds = shifts_of(FIX)
    stages = ("advantages",)

    def inapplicable_reason(self, context: Context) -> str | None:
        """Return why there are no moments over tokens to get wrong."""
        from rolloutdoctor.search.hypotheses.whitening import WHITENINGS

        objective = context.objective
        if objective is None or self._concerned(context) or any(edit.applies(objective) for edit in WHITENINGS):
            return None
        return "the advantages are not whitened"

"""RDA026: rows are trained with the advantages of other rows, which were drawn."""

import polars as pl

from rolloutdoctor.rules.audited import AuditedMeasured
from rolloutdoctor.rules.base import Context, Missing
from rolloutdoctor.rules.known_fault import NO_SUCH_FAULT, KnownFaultRule, of_fixes, shifts_of

FIX = "own-advantages:own"


class ResampledAdvantages(KnownFaultRule):
    """Rows are trained with the advantages of other rows, which were drawn in their place.

    ## What it does
    Where the rows do not reproduce their generalised advantages (`gae`), looks for the row of the step whose advantages
    each row has, token by token. With `use_pf_ppo` verl's V1 trainer resamples rows by their scores and writes the
    advantages and returns of what it drew to the rows as they were: such a run is evaluated with the fix
    `own-advantages` as well.

    ## Why it matters
    Every trajectory is reinforced for what another one did, and where that one was shorter, for its padding. The mean
    of the advantages hardly moves, so no curve shows it, and the rewards that it should favour are not favoured.

    ## How it is measured
    The draw is logged nowhere, so the row that is nearest at 16 of the trained tokens is taken as the drawn one; it
    counts only if all tokens agree with it within their rounding radius. Without the option it is a finding if the
    logged advantages of other rows carry 12 bits of evidence: for each row, those of every value that differs from the
    ones before it, minus log2 of the number of rows. A critic that is 0 everywhere gives one value per row and is no
    evidence. The finding gives the rows whose advantages change (`rows_changed`), and with log-probs how far the
    gradients differ (`relative_change_l1`). With the option it is a warning, confirmed if the logged advantages agree
    with drawn rows and not with the rows' own. If all of them are the rows' own, the rule is skipped: they were
    recorded before rows were drawn.

    ## What to do
    Turn `use_pf_ppo` off, or resample rows before they are stored: tokens, log-probs and advantages together.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> drawn = [x / 2.4**0.5 for x in (-1, -2, -1)]  # those of the second row, for both
    >>> per_token = {"values": [[0, -1, 0], [1, 2, 1]], "advantages": [drawn, drawn]}
    >>> batch = toy_batch([[1, 0]], lengths=[3, 3], per_token=per_token)
    >>> diagnose_one("RDA026", batch, trainer="verl", adv_estimator="gae")
    'RDA026 error confirmed: values_compared 6'
    """

    code = "RDA026"
    name = "resampled-advantages"
    references = (
        "https://github.com/verl-project/verl/issues/7956",
        "https://arxiv.org/abs/2409.06957",
    )
    splits = ("train",)
    fixes = (FIX,)
    reads = of_fixes(FIX)
    adds = shifts_of(FIX)
    stages = ("advantages",)
    remedy = "log the advantages of the update, one a token: the column advantages"

    def inapplicable_reason(self, context: Context) -> str | None:
        """Return None where advantages tell whose they are: generalised ones, or where the options draw rows."""
        from rolloutdoctor.search.hypotheses.drawn_rows import DRAWN_ROWS

        objective = context.objective
        if objective is None or self._concerned(context) or DRAWN_ROWS.applies(objective):
            return None
        return NO_SUCH_FAULT

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Where rows were drawn and all have their own advantages, these are from before that."""
        moved = run.table.select(pl.max(f"{FIX}/largest")).item()
        if self._concerned(context) and not moved:
            return Missing(
                "every row has its own advantages: they were recorded before rows were drawn",
                "record the batch that the actor is updated with, after rows were drawn",
            )
        return super().unseen_reason(run, context)

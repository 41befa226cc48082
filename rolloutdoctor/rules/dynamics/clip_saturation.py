"""RDT007: most of the update is clipped, from the trainer's log alone."""

from dataclasses import replace

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, own_name, percent
from rolloutdoctor.rules.numbers_rule import NumbersRule, series
from rolloutdoctor.rules.table_rule import Measured


class ClipSaturation(NumbersRule):
    """A large part of the tokens is clipped in most steps.

    ## What it does
    Reads the logged clip fraction.

    ## Why it matters
    A clipped token has no policy gradient. A few percent are usual with several updates per batch; where a quarter is
    clipped, the policy moves further within a batch than the clip range allows, or the old log-probs are not the
    policy's.

    ## How it is measured
    `clip_fraction` is the mean over the logged steps. Its median over the last third decides: a warning above 0.4 in
    thirty steps or more, information above 0.25, a gate that users often set; in fewer steps than ten, information
    above 0.4. Exposed: ratios of whole responses (GSPO) are clipped far more often than those of tokens, by design.

    ## What to do
    Lower the learning rate or the number of updates a batch; check that old log-probs are recomputed by the trainer, at
    the same temperature. With one update a batch, look at `RDO006`.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDT007", clip_fraction=[0.5] * 40)
    'RDT007 warning exposed: clip_fraction 0.5'
    """

    code = "RDT007"
    name = "clip-saturation"
    references = ("https://github.com/NovaSky-AI/SkyRL/issues/1353",)
    about = ("clip_fraction",)
    needs_loss = True

    some: float = 0.25
    many: float = 0.4
    lasting: int = 30

    def inapplicable_reason(self, context: Context) -> str | None:
        """Ratios of sequences are clipped by design."""
        objective = context.objective
        is_sequence = objective is not None and objective.surrogate.level != "token"
        return "the ratio is sequence-level, which is clipped often by design" if is_sequence else None

    def judge_few(self, run: Measured, context: Context) -> Judgement | None:
        """Judge a few lines in which so much is clipped that later ones hardly change it."""
        values = series(run, "clip_fraction")
        if not len(values) or float(values.min()) <= self.many:
            return None
        judgement = self.judge_log(run, context)
        return None if judgement is None else replace(judgement, remark=judgement.headline)

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Look at the last third."""
        import numpy as np

        values = series(run, "clip_fraction")
        late = float(np.median(values[-max(1, len(values) // 3) :]))
        # What is above 1 is no share (`RDM003`).
        if not self.some < late <= 1:
            return None
        return Judgement(
            severity=Severity.WARNING if late > self.many and len(values) >= self.lasting else Severity.INFO,
            confirmed=False,
            headline=f"{percent(late)} of the tokens are clipped: their policy gradient is 0",
            message=f"The median clip fraction over the last third of {counted(len(values), 'logged step')} is "
            f"{percent(late)}.",
            evidence="the logged clip fraction; a few percent are normal",
            advice=(
                f"lower {own_name(context, 'the learning rate')} or the number of updates per batch, and check where "
                "the old log-probs come from"
            ),
        )

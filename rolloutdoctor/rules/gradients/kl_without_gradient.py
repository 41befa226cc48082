"""RDG013: groups without a spread of rewards, a KL, and no gradient from it, from the trainer's log alone."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted
from rolloutdoctor.rules.logged_quantities import is_rounded
from rolloutdoctor.rules.numbers_rule import NumbersRule, shown
from rolloutdoctor.rules.table_rule import Measured


class KlWithoutGradient(NumbersRule):
    """In steps where only the KL term has a gradient, the gradient norm is exactly 0.

    ## What it does
    Looks at steps in which every group has equal rewards, so that the policy term is 0, and the logged KL is not.

    ## Why it matters
    The options put a KL term in the loss, and a KL above 0 has a gradient. A norm of exactly 0 there says that the KL
    does not reach the parameters: it is detached, or such groups are dropped before the update. It is the mirror of
    `RDG003`.

    ## How it is measured
    `silent_steps` have a zero-variance share of 1, a KL above 1e-6 and a gradient norm of 0; `zero_spread_steps` are
    all steps with that share and KL. If no option says that the loss has a KL term, the loss must be above 0 in all of
    them. It is a warning if all of them, at least three, are silent. Confirmed: the log itself is the proof.

    ## What to do
    If groups without a spread are filtered, the KL does not hold the policy there; else look at whether the KL is
    computed without a gradient.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_log
    >>> diagnose_log("RDG013", "trl", zero_variance_share=[1.0] * 5, kl=[0.1] * 5, grad_norm=[0.0] * 5, beta=0.1)
    'RDG013 warning confirmed: zero_variance_share 1'
    """

    code = "RDG013"
    name = "kl-without-gradient"
    rests_on = ("kl",)
    references = ("https://github.com/huggingface/trl/issues/4634",)
    about = ("zero_variance_share", "kl", "grad_norm")
    beside = ("loss",)
    needs_loss = True
    part_names = (Part.KL_LOSS,)

    fewest: int = 1
    least: int = 3

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Silent steps of the largest KL."""
        return table.with_columns(value=pl.when(_only_kl(), pl.col("grad_norm") == 0).then("kl").otherwise(0.0))

    def note(self, place: Mapping[str, Any]) -> str:
        """The KL of the step."""
        return shown(place, "kl")

    def judge_log(self, run: Measured, context: Context) -> Judgement | None:
        """Every step without a spread is silent."""
        only = run.table.filter(_only_kl())
        # Without options the loss has to show its KL term: in such steps it is all of it.
        if context.objective is None and not (only["loss"] > 0).fill_null(value=False).all():
            return None
        silent = int((only["grad_norm"] == 0).sum())
        if silent < self.least or silent < len(only) or is_rounded(context, "grad_norm"):
            return None
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=(
                f"the KL term has no gradient in {counted(silent, 'step')}: every group is zero-variance, KL > 0, "
                "gradient norm 0"
            ),
            message=f"In {counted(silent, 'step')} every group has equal rewards and the KL is above 0, and the "
            "gradient norm is exactly 0: the KL term does not reach the parameters.",
            evidence=(
                f"the logged share of zero-variance groups, KL and gradient norm of {counted(len(run.table), 'step')}"
            ),
            advice=(
                "check whether zero-variance groups are dropped before the update, or the KL is computed under no_grad"
            ),
            measures={"silent_steps": Measure(silent, "steps"), "zero_spread_steps": Measure(len(only), "steps")},
        )


def _only_kl() -> pl.Expr:
    return (pl.col("zero_variance_share") == 1) & (pl.col("kl") > 1e-6)

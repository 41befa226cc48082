"""RDA002: groups with one unmasked response."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.objective.parts import Part, has_baseline_per_row
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, baseline_per_token, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class SingletonGroup(TableRule):
    """Groups with a single unmasked response have no baseline.

    ## What it does
    Counts training groups with exactly one unmasked response (or one response, if no mask is logged), and their share
    of the total absolute advantage.

    ## Why it matters
    Without a baseline the advantage says nothing about the other responses: it is the raw score (most estimators of
    verl), the score times a batch factor (its gpg), or 0 (its rloo_vectorized, TRL, slime). With non-negative rewards,
    a raw score as the advantage reinforces the response however bad it is. Rejection makes such groups common.

    ## How it is measured
    `advantage_mass_share` is the sum of |A| over these responses divided by the sum over all unmasked ones, for the
    advantages as configured. Confirmed: the logged advantages of these rows equal the recomputed ones.

    ## What to do
    Drop such groups, or set their advantage to 0, as the fix `rejected-rows:singleton-zero` does.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA002", toy_batch(rewards=[[0.7], [1, 0]]), trainer="verl", adv_estimator="rloo")
    'RDA002 warning exposed: groups 1'
    """

    code = "RDA002"
    name = "singleton-group"
    rests_on = ("advantages",)
    references = ("https://github.com/verl-project/verl/pull/6452",)
    reads = ("score", "advantage")
    adds = ("compared", "is_live", "is_single", "logged", "radius")
    splits = ("train",)
    uses = ("response_mask", "advantage", "advantages")
    """The mask shows which rows are unmasked, logged advantages confirm."""
    part_names = (Part.GROUP_BASELINE,)

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages; none for estimators without a group baseline."""
        if context.objective is None or not has_baseline_per_row(context.objective):
            return frozenset()
        return advantage_columns(context.objective)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A baseline of another kind."""
        return baseline_per_token(context)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The groups as the trainer compares them, which rows count in them, and what was logged of their advantage."""
        rows = step.rows
        if rows is None or rows.advantage_N is None:
            return dict.fromkeys(self.adds)
        live_N = ~rows.score_N.isnan()
        if rows.rejected_N is not None:
            live_N &= ~rows.rejected_N
        single_N = (step.compared_sum(live_N) == 1)[step.compared.index_N] & live_N
        logged_N = step.logged_advantages()
        radius_N = None if logged_N is None else step.advantage_radius()
        return {
            "compared": step.compared_N,
            "is_live": live_N,
            "is_single": single_N,
            "logged": logged_N,
            "radius": radius_N,
        }

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the responses of each step with an advantage, and those without a sibling.

        `error` is how far a logged advantage is from the recomputed one.
        """
        size, error, single = pl.col("advantage").abs(), pl.col("error"), pl.col("is_single")
        off, is_same = (pl.col("logged") - pl.col("advantage")).abs(), error <= pl.col("radius")
        lines = rows.filter(pl.col("is_live").is_not_null()).with_columns(
            error=pl.when(single & off.is_not_nan()).then(off)
        )
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            groups=pl.n_unique("compared"),
            singles=single.sum(),
            single_size=size.filter(single).sum(),
            live_size=size.filter("is_live").sum(),
            carries=(size.filter(single).fill_nan(0.0) > 0).any(),
            told=error.count(),
            same=is_same.sum(),
            largest=error.filter(is_same).max(),
        )
        places = lines.select(*NAMES, "score", "advantage", value=pl.when(single).then(size))
        return with_places(sums, places, context)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of single-response groups, and the advantage that they carry."""
        return {
            "groups": (pl.sum("singles"), "groups"),
            "rows": (pl.sum("singles"), "rows"),
            "advantage_mass_share": (pl.sum("single_size") / pl.sum("live_size"), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Its score and advantage."""
        return f"score {place['score']:.4g}, advantage {place['advantage']:.4g}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Masks that might have left one response of a group."""
        if run["groups"] or "response_mask" in context.columns:
            return None
        return Missing(
            "missing column response_mask, and no group has a single response: nothing says which are fully masked",
            context.to_record("response_mask"),
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No groups."""
        return None if len(run.table) else "there are no training groups"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning if these rows carry advantage, information if they are merely wasted."""
        groups, share = run.count("groups"), run["advantage_mass_share"]
        if not groups:
            return None
        told, same, all_groups = run.table.select(pl.sum("told", "same", "groups")).row(0)
        largest, carries = run.table.select(pl.max("largest"), pl.col("carries").any()).row(0)
        confirmed = same == told > 0
        evidence = "no logged advantages to compare with"
        if told:
            within = f" (within {number(largest)})" if same else ""
            evidence = (
                f"the logged advantages of {same:,} of {counted(told, 'such row')} equal the recomputed ones{within}"
            )
        return Judgement(
            severity=Severity.WARNING if carries else Severity.INFO,
            confirmed=confirmed,
            headline=(
                f"{counted(groups, 'group')} {'has' if groups == 1 else 'have'} only one unmasked response, and so no "
                f"baseline ({percent(share)} of the total absolute advantage)"
            ),
            message=(
                f"{groups:,} of {counted(all_groups, 'group')} have one unmasked response; "
                + (
                    f"these responses carry {percent(share)} of the total absolute advantage without a baseline"
                    if carries
                    else "their advantage is 0, so they add nothing to the policy gradient"
                )
            ),
            evidence=evidence,
            advice=(
                "drop these groups, or set their advantage to 0 (`rolloutdoctor diff --fix "
                "rejected-rows:singleton-zero` shows the effect)"
                if carries
                else "leave these groups out: they only cost tokens"
            ),
        )

"""RDA001: fully masked responses still count in the baseline of their group."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.objective.parts import Part, has_baseline_per_row
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, baseline_per_token, counted, number
from rolloutdoctor.rules.fix_effect import OF_FIX
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

DOUBLE = 2.0**-29
"""Error of float64 as a share of that of float32: unit roundoffs of 2^-53 and 2^-24."""

FIX = "rejected-rows:singleton-raw"

_MASKED = frozenset({RowSet.REJECTED, RowSet.TRUNCATED})
"""Fully masked responses that an option leaves out of baselines."""


class RejectedInBaseline(TableRule):
    """Fully masked responses still count in the group mean and std of the others.

    ## What it does
    Finds fully masked responses with a known reward, recomputes the advantages without them, and reports the unmasked
    responses whose advantage changes.

    ## Why it matters
    A fully masked response contributes no policy gradient, yet its reward still shifts the mean and the standard
    deviation of its group: a rejected reward of 100 beside a 1 moves the baseline by 49.5. Advantages of the other
    responses can flip sign. With some estimators other groups change too: verl's gpg scales all rows by a count over
    the batch, and others whiten over the batch. The choice is contested upstream: TRL and DAPO keep such responses in
    the baseline on purpose, since their reward is evidence about the prompt. It is a warning with its magnitude, and an
    error only where an option of the run asks for the exclusion.

    ## How it is measured
    `live_rows` counts the unmasked responses whose advantage changes, in any group of the step, and `affected_groups`
    their groups; `advantage_shift` is how much these advantages change when fully masked responses are left out.
    `baseline_drift` is the change of the baseline, over the `drifted_rows` unmasked responses whose baseline changes.
    `spurious_share_l1` is the L1 norm of the change of the gradient divided by that of the gradient,
    `relative_change_l1` the same divided by that of the fixed gradient. Gradients are with respect to log-probs and
    need log-probs; L2 shares of the parameters' gradient were 0.7 to 1.2 times as large in nine of ten steps of tiny
    trainings (`docs/how-we-know.md`). Confirmed: where the two formulas differ, the logged advantages match the one
    that includes fully masked responses.

    ## What to do
    Leave fully masked responses out of the group statistics in the trainer. The numbers compare with the fix
    `rejected-rows`.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[100, 1]], mask=[[0, 0], [1, 1]])
    >>> diagnose_one("RDA001", batch, trainer="verl", adv_estimator="rloo")
    'RDA001 warning exposed: rejected_rows 1'
    """

    code = "RDA001"
    name = "rejected-in-baseline"
    rests_on = ("advantages",)
    fix = FIX
    references = (
        "https://github.com/verl-project/verl/pull/6452",
        "https://github.com/verl-project/verl/pull/6375",
    )
    reads = (
        *("score", "advantage", "grad_l1", "grad_sq"),
        *(f"{FIX}/{name}" for name in ("advantage", *OF_FIX)),
    )
    adds = ("compared", "is_rejected", "drift", "is_drifted", "radius", "fixed_radius", "logged", "before_rejection")
    part_names = (Part.GROUP_BASELINE,)

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages, and the mask; none for estimators without a group baseline."""
        if context.objective is None or not has_baseline_per_row(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"response_mask"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages prove it, the earlier mask shows the rejection, log-probs give the gradient."""
        if not self.columns(context) or context.objective is None:
            return frozenset()
        return loss_columns(context.objective) | {"advantage", "advantages", "response_mask_pre"}

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A baseline of another kind."""
        return baseline_per_token(context)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the tokens of each row that were trained on before rejection."""
        if not block.is_logged("response_mask_pre"):
            return {}
        return {"before_rejection": block.row_sum(block.column("response_mask_pre"))}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Fully masked rows, changes of the baseline, and how far float32 may put the advantages of both formulas."""
        from rolloutdoctor.evaluation.row_changes import baseline_drift

        rows, fixed = step.rows, step.fixed(self.fix)
        names = [name for name in self.adds if name != "before_rejection"]
        if rows is None or rows.rejected_N is None or fixed is None or fixed.rows is None:
            return dict.fromkeys(names)
        drift = baseline_drift(rows, fixed.rows, ~rows.rejected_N, step.by_step)
        assert drift is not None  # `columns` asks for estimators with a baseline per row
        values = (
            step.compared_N,
            rows.rejected_N,
            drift[0].abs(),
            drift[1],
            step.advantage_radius(),
            step.advantage_radius(self.fix),
            step.logged_advantages(),
        )
        return dict(zip(names, values, strict=True))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step, and the rows whose advantage changes.

        `shift` is the change of an unmasked one's advantage, `error` that of the log.
        """
        before, after, logged = pl.col("advantage"), pl.col(f"{FIX}/advantage"), pl.col("logged")
        radius, fixed_radius = pl.col("radius"), pl.col("fixed_radius")
        is_scored, masked = pl.col("score").is_not_nan(), pl.col("is_rejected")
        # Where the advantage is NaN there is nothing to compare, and nonfinite-values is about that.
        shift = (before - after).abs().fill_nan(0.0)
        lines = (
            rows.drop_nulls("is_rejected")
            .with_columns(is_here=(masked & is_scored).any().over(STEP_KEY), shift=shift)
            .with_columns(
                # Statistics of other rows round otherwise.
                is_live=pl.col("is_here")
                & (shift > DOUBLE * (radius + fixed_radius).fill_nan(0.0))
                & ~masked
                & is_scored,
                is_drifted=pl.col("is_drifted") & pl.col("is_here"),
            )
        )
        live, drift = pl.col("is_live"), pl.col("drift").filter("is_drifted")
        differs = (live & (shift > radius + fixed_radius) & logged.is_not_nan()).fill_null(value=False)
        error, fixed_error = (logged - before).abs(), (logged - after).abs()
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            rejected=(masked & is_scored).sum(),
            proven=(masked & is_scored & (pl.col("before_rejection") > 0)).sum(),
            groups=pl.col("compared").filter(live).n_unique(),
            drifted=pl.sum("is_drifted"),
            drift=drift.sum(),
            drift_max=drift.max(),
            live=live.sum(),
            shift=pl.col("shift").filter(live).sum(),
            shift_max=pl.col("shift").filter(live).max(),
            flips=(live & (before * after < 0)).sum(),
            told=differs.sum(),
            same=(differs & (error <= radius)).sum(),
            fixed=(differs & (fixed_error <= fixed_radius)).sum(),
            error_max=error.filter(differs).max(),
            fixed_error_max=fixed_error.filter(differs).max(),
            **self._gradients(context),
        )
        places = lines.select(*NAMES, "advantage", without=after, value=pl.when(live).then("shift"))
        return with_places(sums, places, context)

    def _gradients(self, context: Context) -> dict[str, pl.Expr]:
        """Return the sums of the gradients of both objectives, of nothing where the entropy has one too."""
        has_gradient = context.objective is not None and context.objective.entropy_bonus is None
        names = {"grad_l1": "grad_l1", "grad_sq": "grad_sq"} | {f"fixed_{name}": f"{FIX}/{name}" for name in OF_FIX}
        return {name: pl.col(column).sum() if has_gradient else pl.lit(0.0) for name, column in names.items()}

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the shifts of baselines and advantages, and their effect on the gradient."""
        changed, dot, fixed_sq = pl.sum("fixed_versus_l1"), pl.sum("fixed_versus_dot"), pl.sum("fixed_grad_sq")
        return {
            "rejected_rows": (pl.sum("rejected"), "rows"),
            "affected_groups": (pl.sum("groups"), "groups"),
            "baseline_drift_mean": (pl.sum("drift") / pl.sum("drifted"), "reward"),
            "baseline_drift_max": (pl.max("drift_max").fill_null(0.0), "reward"),
            "advantage_shift_mean": (pl.sum("shift") / pl.sum("live"), "advantage"),
            "advantage_shift_max": (pl.max("shift_max").fill_null(0.0), "advantage"),
            "sign_flips": (pl.sum("flips"), "rows"),
            "live_rows": (pl.sum("live"), "rows"),
            "drifted_rows": (pl.sum("drifted"), "rows"),
            "spurious_share_l1": (changed / pl.sum("grad_l1"), "share"),
            "relative_change_l1": (changed / pl.sum("fixed_grad_l1"), "share"),
            "kappa": (dot / fixed_sq, "1"),
            "cosine": (dot / (pl.sum("grad_sq").sqrt() * fixed_sq.sqrt()), "1"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Its advantage in both formulas."""
        return f"advantage {place['advantage']:.4g}, without fully masked responses {place['without']:.4g}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No response to leave out of a baseline."""
        return None if run["rejected_rows"] else "no response with a reward is fully masked"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, since the choice is contested; an error where an option of the run asks for the exclusion."""
        if not run["live_rows"]:
            return None
        error, fixed_error = run.table.select(pl.max("error_max", "fixed_error_max")).row(0)
        told, same, without, proven = run.table.select(pl.sum("told", "same", "fixed", "proven")).row(0)
        if without == told > 0:
            return None  # the trainer already leaves fully masked responses out
        confirmed = same == told > 0
        if confirmed:
            evidence = (
                f"the logged advantages of {counted(told, 'row')} match the formula that includes fully "
                f"masked responses (max error {number(error)}); without them they would differ by up "
                f"to {number(fixed_error)}"
            )
        elif told:
            evidence = (
                f"of {counted(told, 'row')} with a logged advantage {same:,} match the formula that "
                f"includes fully masked responses and {without:,} the one without them: the options do not match this "
                "run"
            )
        else:
            evidence = "no logged advantages to compare with"
        if proven:
            evidence += f"; response_mask_pre shows that {counted(proven, 'row')} had tokens before rejection"
        live = counted(run.count("live_rows"), "advantage")
        asked = context.objective is not None and bool(_MASKED & context.objective.baseline_rows.without)
        return Judgement(
            severity=Severity.ERROR if confirmed and asked else Severity.WARNING,
            confirmed=confirmed,
            headline=f"fully masked responses shift {live}, by {number(run['advantage_shift_mean'])} on average and "
            f"{number(run['advantage_shift_max'])} at most{'' if asked else ' (contested upstream)'}",
            message=(
                f"{counted(run.count('rejected_rows'), 'fully masked response')} still count in the group baseline: "
                f"they shift {live} in {counted(run.count('affected_groups'), 'group')} and flip the sign of "
                f"{run.count('sign_flips'):,}"
            ),
            evidence=evidence,
            advice=(
                "exclude them from the group mean and std, or keep them on purpose; `rolloutdoctor diff --fix "
                "rejected-rows` shows the effect"
            ),
        )

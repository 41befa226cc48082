"""RDA001: fully masked responses still count in the baseline of their group."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part, has_baseline_per_row
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import (
    KEEP_EXAMPLES,
    Context,
    Judgement,
    Missing,
    Rule,
    baseline_per_token,
    counted,
    number,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import RowResult
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

DOUBLE = 2.0**-29
"""What float64 loses of what float32 loses: unit roundoffs of 2^-53 and 2^-24."""


@dataclass(frozen=True)
class RejectedTally(Sums):
    """What `rejected-in-baseline` adds up over unmasked rows whose advantage, or whose baseline, changes."""

    rejected_rows: int = 0
    proven_rows: int = 0
    affected_groups: int = 0
    live_rows: int = 0
    drifted_rows: int = 0
    drift: float = 0.0
    drift_max: float = largest()
    shift: float = 0.0
    shift_max: float = largest()
    sign_flips: int = 0
    grad_l1: float = 0.0
    fixed_l1: float = 0.0
    grad_sq: float = 0.0
    fixed_sq: float = 0.0
    versus_l1: float = 0.0
    versus_dot: float = 0.0
    compared: int = 0
    matched_all: int = 0
    matched_live: int = 0
    error_all: float = largest()
    error_live: float = largest()


@dataclass(frozen=True)
class RejectedInBaseline(Rule[RejectedTally]):
    """Fully masked responses still count in the group mean and std of the others.

    ## What it does
    Finds fully masked responses with a known reward, recomputes the advantages without them, and reports the unmasked
    responses whose advantage changes.

    ## Why it matters
    A fully masked response contributes no policy gradient, yet its reward still shifts the mean and the standard
    deviation of its group: a rejected reward of 100 beside a 1 moves the baseline by 49.5. Advantages of the other
    responses can flip sign. With some estimators other groups change too: verl's gpg scales all rows by a count over
    the batch, and others whiten over the batch. Some projects keep such responses in the baseline on purpose, since
    their reward is evidence about the prompt.

    ## How it is measured
    `live_rows` counts the unmasked responses whose advantage changes, in any group of the step, and `affected_groups`
    counts their groups; `advantage_shift` is the change of these advantages when fully masked responses are left out.
    `baseline_drift` is the change of the baseline, over the `drifted_rows` unmasked responses whose baseline changes.
    `spurious_share_l1` is the change of the gradient over the gradient, `relative_change_l1` over that of the fix.
    Gradient numbers are in log-prob space and need log-probs. Confirmed: where the two formulas differ, the logged
    advantages match the one that includes fully masked responses.

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
    fix = "rejected-rows:singleton-raw"
    references = (
        "https://github.com/verl-project/verl/pull/6452",
        "https://github.com/verl-project/verl/pull/6375",
    )
    tally = RejectedTally

    def columns(self, context: Context) -> frozenset[str]:
        """What the advantages need, and the mask; nothing for estimators without a group baseline."""
        if context.objective is None or not has_baseline_per_row(context.objective):
            return frozenset()
        return advantage_columns(context.objective) | {"response_mask"}

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages prove it, the earlier mask shows the rejection, log-probs give the gradient."""
        if not self.columns(context) or context.objective is None:
            return frozenset()
        return loss_columns(context.objective) | {"advantage", "advantages", "response_mask_pre"}

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The group baseline."""
        return (Part.GROUP_BASELINE,)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A baseline of another kind."""
        return baseline_per_token(context)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the tokens of each row that were trained on before rejection."""
        if not block.is_logged("response_mask_pre"):
            return {}
        return {"before_rejection": block.row_sum(block.column("response_mask_pre"))}

    def measure(self, step: "StepView") -> RejectedTally:
        """Count one step."""
        fixed, rows = step.fixed.get(self.fix or ""), step.rows
        if fixed is None or fixed.rows is None or rows is None or rows.rejected_N is None:
            return RejectedTally()
        rejected_N = rows.rejected_N & ~rows.score_N.isnan()
        if not bool(rejected_N.any()):
            # Its gradient is part of the run's all the same, and the shares of the run are shares of all of it.
            return self._gradient(step)
        shift_N = self._shift(step)
        drift_N, drifted_N = self._drift(step)
        live_N = self._affected(step, shift_N)
        before_N, after_N = rows.advantage_N, fixed.rows.advantage_N
        assert before_N is not None
        assert after_N is not None
        proven = 0
        generated = step.token_measures.get(self.code, {})
        if generated:
            proven = int((rejected_N & (generated["before_rejection"] > 0)).sum())
        found = RejectedTally(
            rejected_rows=int(rejected_N.sum()),
            proven_rows=proven,
            affected_groups=int((step.compared_sum(live_N) > 0).sum()),
            live_rows=int(live_N.sum()),
            drifted_rows=int(drifted_N.sum()),
            drift=float(drift_N[drifted_N].sum()),
            drift_max=float(drift_N[drifted_N].max()) if bool(drifted_N.any()) else 0.0,
            shift=float(shift_N[live_N].sum()),
            shift_max=float(shift_N[live_N].max()) if bool(live_N.any()) else 0.0,
            sign_flips=int((live_N & (shift_N > 0) & (before_N * after_N < 0)).sum()),
        )
        return found + self._gradient(step) + self._compare(step, live_N, before_N, after_N)

    def _affected(self, step: "StepView", shift_N: "Tensor") -> "Tensor":
        """Live rows whose advantage changes, ``[N]`` bool.

        Not those where it is NaN: there is nothing to compare, and nonfinite-values is about that.
        """
        rows = step.rows
        assert rows is not None
        assert rows.rejected_N is not None
        affected_N: Tensor = (shift_N > 0) & ~rows.rejected_N & ~rows.score_N.isnan()
        return affected_N

    def _drift(self, step: "StepView") -> "tuple[Tensor, Tensor]":
        """Absolute change of the baseline, ``[N]``, and the unmasked rows that have one, ``[N]`` bool."""
        from rolloutdoctor.evaluation.row_changes import baseline_drift

        before, after = step.rows, step.fixed[self.fix or ""].rows
        assert before is not None
        assert before.rejected_N is not None
        assert after is not None
        found = baseline_drift(before, after, ~before.rejected_N)
        assert found is not None  # `columns` asks for estimators with a baseline per row
        return found[0].abs(), found[1]

    def _shift(self, step: "StepView") -> "Tensor":
        """Absolute change of the advantage, ``[N]``."""
        before, after = step.rows, step.fixed[self.fix or ""].rows
        assert before is not None
        assert after is not None
        return step.cached("shift of advantages", lambda: self._shifted(step, before, after))

    def _shifted(self, step: "StepView", before: "RowResult", after: "RowResult") -> "Tensor":
        assert before.advantage_N is not None
        assert after.advantage_N is not None
        shift_N = (before.advantage_N - after.advantage_N).abs()
        # Statistics of other rows round otherwise; NaN stays NaN.
        changed_N = ~(shift_N <= DOUBLE * (step.advantage_radius() + step.advantage_radius(self.fix)))
        return shift_N * changed_N

    def _gradient(self, step: "StepView") -> RejectedTally:
        before, after = step.tokens, step.fixed[self.fix or ""].tokens
        if before is None or after is None:
            return RejectedTally()
        return RejectedTally(
            grad_l1=float(before.grad_l1_N.sum()),
            fixed_l1=float(after.grad_l1_N.sum()),
            grad_sq=float(before.grad_sq_N.sum()),
            fixed_sq=float(after.grad_sq_N.sum()),
            versus_l1=float(after.versus_l1_N.sum()),
            versus_dot=float(after.versus_dot_N.sum()),
        )

    def _compare(self, step: "StepView", live_N: "Tensor", all_N: "Tensor", kept_N: "Tensor") -> RejectedTally:
        """Hold the logged advantages against both formulas, on the rows where these differ."""
        logged_N = step.logged_advantages()
        if logged_N is None:
            return RejectedTally()
        radius_all_N, radius_live_N = step.advantage_radius(), step.advantage_radius(self.fix)
        differ_N = live_N & ((all_N - kept_N).abs() > radius_all_N + radius_live_N) & ~logged_N.isnan()
        error_all_N, error_live_N = (logged_N - all_N).abs(), (logged_N - kept_N).abs()
        matched_all_N = differ_N & (error_all_N <= radius_all_N)
        matched_live_N = differ_N & (error_live_N <= radius_live_N)
        return RejectedTally(
            compared=int(differ_N.sum()),
            matched_all=int(matched_all_N.sum()),
            matched_live=int(matched_live_N.sum()),
            error_all=float(error_all_N[differ_N].max()) if bool(differ_N.any()) else 0.0,
            error_live=float(error_live_N[differ_N].max()) if bool(differ_N.any()) else 0.0,
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The unmasked rows whose advantage changes most."""
        fixed, rows = step.fixed.get(self.fix or ""), step.rows
        if fixed is None or fixed.rows is None or rows is None or rows.rejected_N is None:
            return ()
        if not bool(rows.rejected_N.any()):
            return ()
        shift_N = self._shift(step)
        before_N, after_N = rows.advantage_N, fixed.rows.advantage_N
        assert before_N is not None
        assert after_N is not None

        def note(row: int) -> str:
            return f"advantage {float(before_N[row]):.4g}, without fully masked responses {float(after_N[row]):.4g}"

        moved_N = shift_N.nan_to_num(0.0) * self._affected(step, shift_N)
        return step.worst_rows(moved_N, note, KEEP_EXAMPLES)

    def measures(self, tally: RejectedTally) -> Mapping[str, Measure]:
        """How far baselines and advantages move, and what that does to the gradient."""
        return {
            "rejected_rows": Measure(tally.rejected_rows, "rows"),
            "affected_groups": Measure(tally.affected_groups, "groups"),
            "baseline_drift_mean": Measure(ratio(tally.drift, tally.drifted_rows), "reward"),
            "baseline_drift_max": Measure(tally.drift_max, "reward"),
            "advantage_shift_mean": Measure(ratio(tally.shift, tally.live_rows), "advantage"),
            "advantage_shift_max": Measure(tally.shift_max, "advantage"),
            "sign_flips": Measure(tally.sign_flips, "rows"),
            "live_rows": Measure(tally.live_rows, "rows"),
            "drifted_rows": Measure(tally.drifted_rows, "rows"),
            "spurious_share_l1": Measure(ratio(tally.versus_l1, tally.grad_l1), "share"),
            "relative_change_l1": Measure(ratio(tally.versus_l1, tally.fixed_l1), "share"),
            "kappa": Measure(ratio(tally.versus_dot, tally.fixed_sq), "1"),
            "cosine": Measure(ratio(tally.versus_dot, sqrt(tally.grad_sq) * sqrt(tally.fixed_sq)), "1"),
        }

    def vacuous_reason(self, run: RejectedTally, context: Context) -> str | None:
        """No response to leave out of a baseline."""
        return None if run.rejected_rows else "no response with a reward is fully masked"

    def judge(self, run: RejectedTally, context: Context) -> Judgement | None:
        """An error if the logged advantages show it, a warning if nothing logged decides it."""
        if not run.affected_groups or not run.shift_max > 0:
            return None
        if run.compared and run.matched_live == run.compared:
            return None  # the trainer already leaves fully masked responses out
        confirmed = run.compared > 0 and run.matched_all == run.compared
        if confirmed:
            evidence = (
                f"the logged advantages of {counted(run.compared, 'row')} match the formula that includes fully masked "
                f"responses (max error {number(run.error_all)}); without them they would differ by up to "
                f"{number(run.error_live)}"
            )
        elif run.compared:
            evidence = (
                f"of {counted(run.compared, 'row')} with a logged advantage {run.matched_all:,} match the formula that "
                f"includes fully masked responses and {run.matched_live:,} the one without them: the options given are "
                "not those of this run"
            )
        else:
            evidence = "no logged advantages to compare with"
        if run.proven_rows:
            evidence += f"; response_mask_pre shows that {counted(run.proven_rows, 'row')} had tokens before rejection"
        shift = ratio(run.shift, run.live_rows)
        return Judgement(
            severity=Severity.ERROR if confirmed else Severity.WARNING,
            confirmed=confirmed,
            headline=f"fully masked responses shift {counted(run.live_rows, 'advantage')}, by {number(shift)} on "
            f"average and {number(run.shift_max)} at most",
            message=(
                f"{counted(run.rejected_rows, 'fully masked response')} still count in the group baseline: "
                f"{counted(run.live_rows, 'advantage')} in {counted(run.affected_groups, 'group')} shift, "
                f"{run.sign_flips:,} of them flip sign"
            ),
            evidence=evidence,
            advice=("leave them out of the group mean and std; compare with `rolloutdoctor diff --fix rejected-rows`"),
        )

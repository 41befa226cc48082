"""RDA001: fully masked responses still count in the baseline of their group."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Any

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
    from numpy.typing import NDArray
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

    Columns = dict[str, NDArray[Any]]
    """Name of a field of the tally to its value in each step, ``[S]``."""

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

    def measure_each(self, steps: "StepView") -> list[RejectedTally]:
        """Count the rows of each step that fully masked ones change."""
        fixed, rows = steps.fixed(self.fix), steps.rows
        if fixed is None or fixed.rows is None or rows is None or rows.rejected_N is None:
            return steps.nothing(RejectedTally)
        rejected_N = rows.rejected_N & ~rows.score_N.isnan()
        # The gradient of other steps is part of the run's all the same, and its shares are shares of all of it.
        found = {"rejected_rows": steps.by_step.count(rejected_N), **self._gradient(steps)}
        if bool(rejected_N.any()):
            found |= self._changes(steps, rejected_N)
        return steps.tallies(RejectedTally, **found)

    def _changes(self, steps: "StepView", rejected_N: "Tensor") -> "Columns":
        """Count the changes in steps with fully masked rows."""
        import torch

        by_step, (before_N, after_N) = steps.by_step, self._advantages(steps)
        here_N = by_step.expand(by_step.any(rejected_N))
        live_N = self._affected(steps) & here_N
        drift_N, drifted_N = self._drift(steps)
        drifted_N &= here_N
        drift_N, shift_N = torch.where(drifted_N, drift_N, 0.0), torch.where(live_N, self._shift(steps), 0.0)
        found = {
            "affected_groups": steps.compared_by_step.count(steps.compared_sum(live_N) > 0),
            "live_rows": by_step.count(live_N),
            "drifted_rows": by_step.count(drifted_N),
            "drift": by_step.sum(drift_N),
            "drift_max": by_step.high(drift_N),
            "shift": by_step.sum(shift_N),
            "shift_max": by_step.high(shift_N),
            "sign_flips": by_step.count(live_N & (before_N * after_N < 0)),
        }
        generated = steps.token_measures.get(self.code, {})
        if generated:
            found["proven_rows"] = by_step.count(rejected_N & (generated["before_rejection"] > 0))
        return found | self._compare(steps, live_N)

    def _affected(self, steps: "StepView") -> "Tensor":
        """Live rows whose advantage changes, ``[N]`` bool.

        Not those where it is NaN: there is nothing to compare, and nonfinite-values is about that.
        """
        rows = steps.rows
        assert rows is not None
        assert rows.rejected_N is not None
        affected_N: Tensor = (self._shift(steps) > 0) & ~rows.rejected_N & ~rows.score_N.isnan()
        return affected_N

    def _drift(self, steps: "StepView") -> "tuple[Tensor, Tensor]":
        """Absolute change of the baseline, ``[N]``, and the unmasked rows that have one, ``[N]`` bool."""
        from rolloutdoctor.evaluation.row_changes import baseline_drift

        before, fixed = steps.rows, steps.fixed(self.fix)
        assert before is not None
        assert before.rejected_N is not None
        assert fixed is not None
        assert fixed.rows is not None
        found = baseline_drift(before, fixed.rows, ~before.rejected_N, steps.by_step)
        assert found is not None  # `columns` asks for estimators with a baseline per row
        return found[0].abs(), found[1]

    def _advantages(self, steps: "StepView") -> "tuple[Tensor, Tensor]":
        """As configured, and without fully masked rows, ``[N]`` each."""
        before, fixed = steps.rows, steps.fixed(self.fix)
        assert before is not None
        assert before.advantage_N is not None
        assert fixed is not None
        assert fixed.rows is not None
        assert fixed.rows.advantage_N is not None
        return before.advantage_N, fixed.rows.advantage_N

    def _shift(self, steps: "StepView") -> "Tensor":
        """Absolute change of the advantage, ``[N]``."""
        return steps.cached("shift of advantages", lambda: self._shifted(steps))

    def _shifted(self, steps: "StepView") -> "Tensor":
        before_N, after_N = self._advantages(steps)
        shift_N = (before_N - after_N).abs()
        # Statistics of other rows round otherwise; NaN stays NaN.
        changed_N = ~(shift_N <= DOUBLE * (steps.advantage_radius() + steps.advantage_radius(self.fix)))
        return shift_N * changed_N

    def _gradient(self, steps: "StepView") -> "Columns":
        """Add up the gradients of each step, as configured and with the fix."""
        before, fixed, by_step = steps.tokens, steps.fixed(self.fix), steps.by_step
        if before is None or fixed is None or fixed.tokens is None or fixed.objective.entropy_bonus is not None:
            return {}
        after = fixed.tokens
        return {
            "grad_l1": by_step.sum(before.grad_l1_N),
            "fixed_l1": by_step.sum(after.grad_l1_N),
            "grad_sq": by_step.sum(before.grad_sq_N),
            "fixed_sq": by_step.sum(after.grad_sq_N),
            "versus_l1": by_step.sum(after.versus_l1_N),
            "versus_dot": by_step.sum(after.versus_dot_N),
        }

    def _compare(self, steps: "StepView", live_N: "Tensor") -> "Columns":
        """Hold the logged advantages against both formulas, on the rows where these differ."""
        import torch

        logged_N, by_step = steps.logged_advantages(), steps.by_step
        if logged_N is None:
            return {}
        all_N, kept_N = self._advantages(steps)
        radius_all_N, radius_live_N = steps.advantage_radius(), steps.advantage_radius(self.fix)
        differ_N = live_N & ((all_N - kept_N).abs() > radius_all_N + radius_live_N) & ~logged_N.isnan()
        error_all_N, error_live_N = (torch.where(differ_N, (logged_N - x_N).abs(), 0.0) for x_N in (all_N, kept_N))
        return {
            "compared": by_step.count(differ_N),
            "matched_all": by_step.count(differ_N & (error_all_N <= radius_all_N)),
            "matched_live": by_step.count(differ_N & (error_live_N <= radius_live_N)),
            "error_all": by_step.high(error_all_N),
            "error_live": by_step.high(error_live_N),
        }

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The unmasked rows whose advantage changes most."""
        fixed, rows, by_step = step.fixed(self.fix), step.rows, step.by_step
        if fixed is None or fixed.rows is None or rows is None or rows.rejected_N is None:
            return ()
        if not bool(rows.rejected_N.any()):
            return ()
        before_N, after_N = self._advantages(step)

        def note(row: int) -> str:
            return f"advantage {float(before_N[row]):.4g}, without fully masked responses {float(after_N[row]):.4g}"

        here_N = by_step.expand(by_step.any(rows.rejected_N))
        return step.worst_rows(self._shift(step).nan_to_num(0.0) * (self._affected(step) & here_N), note, KEEP_EXAMPLES)

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

"""Base of rules about faults that releases of trainers have: what a known fix would change in a run, and how much."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.rules.audited import OTHERWISE, AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, number
from rolloutdoctor.rules.fix_effect import OF_FIX, ROUNDING, FixEffect, sums_of
from rolloutdoctor.rules.table_rule import Quantity, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView
    from rolloutdoctor.search.hypotheses.fixes import ChosenFix


NO_SUCH_FAULT = "the options and the release have no such fault"
"""Why such a rule is not applicable."""


def of_fixes(*labels: str) -> tuple[str, ...]:
    """Return the columns of `rows` that a rule about some fixes reads."""
    return ("grad_l1", "grad_sq", "trained_tokens", *(f"{label}/{name}" for label in labels for name in OF_FIX))


def shifts_of(*labels: str) -> tuple[str, ...]:
    """Return the columns that such a rule adds: how far each fix moves the advantage of a row."""
    return tuple(f"{label}/shift" for label in labels)


class KnownFaultRule(DirectRule):
    """A rule about what trainers compute without some fixes, which name the rule by its code.

    The objective of the run is evaluated with each fix that applies to it. Where the numbers differ the run has the
    fault, and the difference is its size. It is confirmed where logged values agree with the objective as it is, and
    differ from the fixed one by more than their rounding radii.

    Attributes:
        fixes: ``NAME:VARIANT`` of each.
        negligible: share of the log-prob gradient up to which it is information.
    """

    fixes: ClassVar[tuple[str, ...]] = ()
    negligible: ClassVar[float] = 0.001

    def compared_fixes(self, context: Context) -> tuple[str, ...]:
        """Return the fixes that apply to the run, and whose columns it has."""
        objective = context.objective
        return tuple(
            chosen.label
            for chosen in self._concerned(context)
            if objective is not None and not self._absent(chosen, context)
        )

    def _concerned(self, context: Context) -> "list[ChosenFix]":
        """The fixes that are about what the run computes."""
        from rolloutdoctor.search.hypotheses.fixes import choose

        objective = context.objective
        return [] if objective is None else [fix for fix in map(choose, self.fixes) if fix.applies_to(objective)]

    def _absent(self, chosen: "ChosenFix", context: Context) -> frozenset[str]:
        """Columns without which the fix cannot be evaluated."""
        assert context.objective is not None
        return (
            chosen.fix.columns(context.objective) | advantage_columns(chosen.apply(context.objective))
        ) - context.columns

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and those of the fixes."""
        columns, objective = super().optional_columns(context), context.objective
        of_fixes = (fix.columns(objective) for fix in self._concerned(context) if objective is not None)
        return columns.union(*of_fixes, {"response_mask"}) if objective is not None else columns

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return how far each fix moves the advantage of a row, or those of its tokens on average."""
        return {name: _shift(step, name.removesuffix("/shift")) for name in self.adds}

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Count for each fix the logged values that tell the two formulas apart."""
        return {
            f"{label}/{name}": value
            for label in self.fixes
            if step.fixed(label) is not None
            for name, value in zip(("told", "as_is", "fixed"), step.told(label), strict=True)
        }

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return what each fix changes in each step, and the rows that it moves."""
        sums = {name: sum_ for label in self.fixes for name, sum_ in sums_of(label).items()}
        steps = rows.group_by(STEP_KEY, maintain_order=True).agg(masked=(pl.col("trained_tokens") == 0).sum(), **sums)
        shift = pl.max_horizontal(pl.col(name) for name in self.adds)
        return with_places(steps, rows.select(*NAMES, value=shift), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return the steps, the rows that each fix moves, and the lines of the audit."""
        return self.with_audit(run.rows, run)

    def judge(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Report a cause that the audit established, else the fix that changes most."""
        return super().judge(run, context) or self._of_fixes(run, context)

    def shown(self, place: Mapping[str, Any]) -> str:
        """How far the advantage of a row is moved."""
        return f"its advantage differs by {number(place['value'])}"

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Where the objective with a fix was evaluated, the rows themselves tell."""
        is_told = any(run.table[f"{label}/largest"].count() for label in self.fixes)
        return None if is_told else super().inconclusive_reason(run, context)

    def _of_fixes(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        labels = self.compared_fixes(context)
        effects = (FixEffect.of(fix, run, context) for fix in self._concerned(context) if fix.label in labels)
        ordered = sorted(
            (effect for effect in effects if effect is not None), key=lambda effect: -(effect.change or 0.0)
        )
        return ordered[0].judgement(self.negligible, tuple(ordered[1:])) if ordered else None


class ReleaseFaultRule(KnownFaultRule):
    """A rule about such fixes alone: of a trainer that has none of the faults it is not applicable."""

    remedy = OTHERWISE

    def inapplicable_reason(self, context: Context) -> str | None:
        """Say that no fix applies."""
        if context.objective is None or self._concerned(context):
            return None
        return NO_SUCH_FAULT

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Name the columns without which no fix that applies can be compared."""
        concerned = self._concerned(context)
        if not concerned or self.compared_fixes(context):
            return None
        absent = sorted(frozenset().union(*(self._absent(fix, context) for fix in concerned)))
        return Missing(f"missing {', '.join(absent)}", f"record {' and '.join(absent)} for every row")

    def vacuous_reason(self, run: AuditedMeasured, context: Context) -> str | None:
        """None: the fixed objective was evaluated on the rows."""
        return None

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """None: that the two give the same numbers in these rows needs no log."""
        return None

    def quantities(self) -> Mapping[str, Quantity]:
        """Count the rows that a fix moves."""
        is_moved = (pl.col("value") > 0) & pl.col("quantity").is_null()
        return {"rows_changed": (is_moved.sum(), "rows")}

    def occurrences(self, run: RunTables) -> int:
        """Return the steps that were read."""
        return run.steps.height


def _shift(step: "StepView", label: str) -> "Tensor | None":
    """How far a fix moves the advantage of each row, ``[N]``; 0 within float64 rounding, None where it is not known."""
    rows, fixed = step.rows, step.fixed(label)
    after = None if fixed is None else fixed.rows
    if rows is None or after is None:
        return None
    if rows.advantage_N is not None and after.advantage_N is not None:
        return _beyond_rounding(rows.advantage_N, after.advantage_N)
    if rows.advantage_T is None or after.advantage_T is None:
        return None
    moved_T = _beyond_rounding(rows.advantage_T.double(), after.advantage_T.double())
    return step.row_sum(moved_T) / step.batch.rows.diff().clamp(min=1)


def _beyond_rounding(before: "Tensor", after: "Tensor") -> "Tensor":
    import torch

    shift = (before - after).abs().nan_to_num(0.0)
    size = torch.maximum(before.abs(), after.abs()).nan_to_num(0.0)
    return torch.where(shift > ROUNDING * (1 + size), shift, 0.0)

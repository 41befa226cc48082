"""`FixEffect`: what a known fix changes in a run, in numbers and in words."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, percent, release_with_fix

if TYPE_CHECKING:
    from rolloutdoctor.rules.audited import AuditedMeasured
    from rolloutdoctor.search.hypotheses.fixes import ChosenFix

ROUNDING = 1e-9
"""Share of an advantage, or of a gradient, up to which two float64 evaluations are the same."""

OF_FIX = ("grad_l1", "grad_sq", "versus_l1", "versus_dot")

OF_STEP = ("l1", "sq", *OF_FIX)
"""Sums over the rows of a step that both objectives have a gradient of; the first two are without the fix."""


def sums_of(label: str) -> dict[str, pl.Expr]:
    """Return what a fix changes in a step, as sums over its rows; `largest` is null where it was not evaluated."""
    shift, names = pl.col(f"{label}/shift"), ("grad_l1", "grad_sq", *(f"{label}/{name}" for name in OF_FIX))
    both = pl.col("grad_l1").is_not_null() & pl.col(f"{label}/versus_l1").is_not_null()
    sums = {column: pl.col(name).filter(both).sum() for column, name in zip(OF_STEP, names, strict=True)}
    sums |= {"rows": (shift > 0).sum(), "shift": shift.sum(), "largest": shift.max()}
    return {f"{label}/{name}": sum_ for name, sum_ in sums.items()}


class Told(NamedTuple):
    """Logged values that tell a trainer with a fix from one without it.

    Attributes:
        told: how many there are.
        as_is: those that agree with the trainer as it is.
        fixed: those that agree with the fixed one.
    """

    told: int
    as_is: int
    fixed: int


@dataclass(frozen=True)
class FixEffect:
    """What a fix changes in a run.

    Attributes:
        chosen: the fix.
        made: who made the run.
        remedy: the release of the trainer that has the fix, or that none has.
        rows: rows whose advantage it moves.
        shift: by how much on average.
        change: absolute change of the log-prob gradient, as a share of the gradient of the fixed objective.
        kappa: <g, g_fixed> / <g_fixed, g_fixed>.
        cosine: of the angle between the two.
        scales: all derivatives of the loss are smaller, or all larger: the fix changes their size alone.
        masked: rows without a trained token.
        told: logged values that tell both apart.
    """

    chosen: "ChosenFix"
    made: str
    remedy: str
    rows: int
    shift: float
    change: float | None
    kappa: float | None
    cosine: float | None
    scales: bool
    masked: int
    told: Told

    @classmethod
    def of(cls, chosen: "ChosenFix", run: "AuditedMeasured", context: Context) -> "FixEffect | None":
        """Query a run; None where the fix changes nothing there, or the logged values say that the run has it."""
        label, table = chosen.label, run.table
        counts = run.run.by_step(*(f"{label}/{name}" for name in Told._fields)).drop("step", "split").sum()
        told = Told(*(int(value or 0) for value in counts.row(0)))
        if told.told and told.fixed == told.told:
            return None
        rows, shift, *sums = table.select(pl.sum(*(f"{label}/{name}" for name in ("rows", "shift", *OF_STEP)))).row(0)
        l1, square, fixed_l1, fixed_square, versus, dot = map(float, sums)
        change = versus / (fixed_l1 or l1) if fixed_l1 or l1 else None
        if not rows and (change or 0.0) <= ROUNDING:
            return None
        version = "" if context.objective is None else context.objective.version
        title = "the trainer" if context.trainer is None else context.trainer.title
        return cls(
            chosen=chosen,
            made=f"{title} {version}".strip(),
            remedy=release_with_fix(context, chosen.fix.name),
            rows=rows,
            shift=shift / rows if rows else 0.0,
            change=change,
            kappa=dot / fixed_square if fixed_square else None,
            cosine=dot / (square * fixed_square) ** 0.5 if square * fixed_square else None,
            scales=not rows and abs(fixed_l1 - l1) >= (1 - ROUNDING) * versus > 0,
            masked=int(table["masked"].sum()),
            told=told,
        )

    @property
    def fault(self) -> str:
        """What is computed without the fix, as a clause."""
        return self.chosen.fix.fault.format(masked=counted(self.masked, "fully masked response"))

    @property
    def confirmed(self) -> bool:
        """True if logged values tell the trainer as it is from the fixed one, and all agree with the former."""
        return 0 < self.told.told == self.told.as_is

    def magnitude(self) -> str:
        """Say how much it changes."""
        parts = []
        if self.rows:
            parts.append(f"{counted(self.rows, 'advantage')} differ by {number(self.shift)} on average")
        if self.change is not None and self.change > ROUNDING:
            smaller = "smaller" if (self.kappa or 0.0) < 1 else "larger"
            parts.append(
                f"loss and gradient are {percent(self.change)} {smaller}"
                if self.scales
                else f"{percent(self.change)} of the log-prob gradient"
            )
        return ", ".join(parts)

    def evidence(self) -> str:
        """Say what the logged values tell."""
        told = self.told
        if not told.told:
            return f"the options: {self.made} computes it so, and no logged value tells the two apart"
        values = counted(told.told, "logged value")
        if self.confirmed:
            return f"{values} for which the two differ agree with {self.made} as it is"
        return f"of {values} {told.as_is:,} agree with {self.made} as it is, and {told.fixed:,} with the fix"

    def judgement(self, negligible: float, others: "tuple[FixEffect, ...]" = ()) -> Judgement:
        """Return the finding.

        Args:
            negligible: share of the log-prob gradient up to which it is information.
            others: the effects of other fixes, which are mentioned.
        """
        fix = self.chosen.fix
        is_small = self.change is not None and self.change <= negligible
        measures = {
            "rows_changed": (self.rows, "rows"),
            "advantage_shift_mean": (self.shift if self.rows else None, "advantage"),
            "relative_change_l1": (self.change, "share"),
            "kappa": (self.kappa, "1"),
            "cosine": (self.cosine, "1"),
        }
        more = "".join(f"; {other.fault}: {other.magnitude()}" for other in others)
        of_choice = " (contested upstream)" if fix.contested else " (an option of the run)" if fix.by_option else ""
        return Judgement(
            severity=Severity.INFO if fix.contested or fix.by_option or is_small else Severity.WARNING,
            confirmed=self.confirmed,
            headline=f"{self.fault}: {self.magnitude()}",
            message=f"in {self.made}{of_choice} {self.fault}: {self.magnitude()}{more}",
            evidence=self.evidence(),
            advice=(f"{self.remedy}; `rolloutdoctor diff --fix {fix.name}` shows the effect"),
            measures={name: Measure(value, unit) for name, (value, unit) in measures.items() if value is not None},
            fix=self.chosen.label,
        )

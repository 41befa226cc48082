"""Faults that the recorded release has by its own account: the fixes that a run is told apart from."""

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.search.hypotheses.fixes import FIXES, ChosenFix


def is_known_fault(label: str) -> bool:
    """Return True of a fix (``NAME:VARIANT``) of a fault, and not of a choice, whose formula can be told apart."""
    fix = FIXES.get(label.partition(":")[0])
    return fix is not None and not (fix.contested or fix.by_option or fix.of_rounding)


def known_faults(objective: Objective, columns: frozenset[str]) -> tuple[ChosenFix, ...]:
    """Return the fixes of faults that an objective has, as far as a run has their columns.

    Args:
        objective: what the recorded options and release compute.
        columns: canonical columns of the run.
    """
    chosen = (ChosenFix(fix, next(iter(fix.variants))) for fix in FIXES.values())
    return tuple(
        variant
        for variant in chosen
        if is_known_fault(variant.label)
        and not variant.fix.of_data
        and variant.applies_to(objective)
        and variant.fix.columns(objective) | advantage_columns(variant.apply(objective)) <= columns
    )


def code_of(label: str) -> str:
    """Return the code of the rule that reports the fault of a fix."""
    return FIXES[label.partition(":")[0]].code

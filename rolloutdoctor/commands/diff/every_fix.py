"""`diff --all-fixes`: the fixes that can be compared on a run, the others with the reason, and their order."""

import math

from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.prepare import run_context
from rolloutdoctor.engine.requirements import absent_columns
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.required_columns import UNKNOWN_LOSS
from rolloutdoctor.results.comparison import Effect, UntriedFix
from rolloutdoctor.search.hypotheses.fixes import FIXES, ChosenFix, choose


def every_fix(run: Run, configured: Configured) -> tuple[tuple[ChosenFix, ...], tuple[UntriedFix, ...]]:
    """Return the fixes that can be compared on a run, in each variant, and those that cannot."""
    context, objective = run_context(run, comparable(run.metrics, configured), configured), configured.objective
    able, others = [], []
    for name, fix in FIXES.items():
        chosen = choose(name)
        if not chosen.applies_to(objective):
            others.append(UntriedFix(chosen.label, applies=False, why=f"needs {chosen.fix.needs}"))
            continue
        absent = absent_columns(run, chosen.columns(objective))
        if UNKNOWN_LOSS in absent:
            others.append(UntriedFix(chosen.label, applies=True, why=objective.unknown_loss))
        elif absent:
            why = f"without {', '.join(absent)}; {remedy(absent, context)}"
            others.append(UntriedFix(chosen.label, applies=True, why=why))
        else:
            able += [
                variant
                for variant in (choose(f"{name}:{each}") for each in fix.variants)
                if variant.applies_to(objective) and not absent_columns(run, variant.columns(objective))
            ]
    return tuple(able), tuple(others)


def by_size(effect: Effect) -> tuple[float, ...]:
    """Key that sorts effects, the largest first: by gradient, advantages, metrics."""

    def of(name: str) -> float:
        value = effect.total[name].value
        return 0.0 if value is None else math.inf if math.isnan(value) else value

    moved = sum(pair.before != pair.after for pair in effect.metrics.values())
    return (-of("spurious_share_l1"), -of("changed_rows"), -moved)

"""Count over the steps of a run how many logged values each cause explains, and how much it changes."""

from collections.abc import Iterable
from dataclasses import replace
from math import sqrt

from rolloutdoctor.audit.factors import added_term, factor_of, remedy_of
from rolloutdoctor.audit.tally import AuditTally, QuantityTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.exact import ratio
from rolloutdoctor.search.bounded_counts import bounded_counts, with_bounds
from rolloutdoctor.search.cause_search import Established, Search
from rolloutdoctor.search.diagnosis import Diagnosis, undiagnosed
from rolloutdoctor.search.hypotheses.advantage_fits import AS_LOGGED
from rolloutdoctor.search.hypotheses.table import FIX_CODE
from rolloutdoctor.search.step import Step


class CauseCount:
    """Counts of the values that a cause explains and changes, over the steps of a run."""

    def __init__(self) -> None:
        self.base: AuditTally = {}
        self.found: AuditTally = {}
        self.steps: list[int] = []
        self.rows = self.moved = self.flips = 0
        self.shift = self.shift_max = 0.0
        self.gradient = [0.0] * 5

    def add(
        self, step: int, base: AuditTally, tallies: AuditTally, before: Evaluation | None, after: Evaluation | None
    ) -> None:
        """Add one step, audited and evaluated before and after the edit."""
        self.base, self.found = add_tallies(self.base, base), add_tallies(self.found, tallies)
        if any(tally.disagree and name in tallies and not tallies[name].disagree for name, tally in base.items()):
            self.steps.append(step)
        if before is None or after is None:
            return
        self._advantages(before, after)
        if before.per_token is None or after.per_token is None:
            return
        recorded_T, made_T = before.per_token.grad_T.double(), after.per_token.grad_T.double()
        difference_T = made_T - recorded_T
        sums = (recorded_T.abs(), difference_T.abs(), recorded_T.square(), made_T.square(), recorded_T * made_T)
        self.gradient = [sum_ + float(x_T.nan_to_num(0.0).sum()) for sum_, x_T in zip(self.gradient, sums, strict=True)]

    def _advantages(self, before: Evaluation, after: Evaluation) -> None:
        old_N, new_N = (
            None if evaluation.rows is None else evaluation.rows.advantage_N for evaluation in (before, after)
        )
        if old_N is None or new_N is None:
            return
        shift_N = (new_N - old_N).abs().nan_to_num(0.0)
        self.rows += len(shift_N)
        self.moved += int((shift_N > 1e-6 * old_N.abs().nan_to_num(0.0).clamp(min=1e-6)).sum())
        self.flips += int((old_N * new_N < 0).sum())
        self.shift += float(shift_N.sum())
        self.shift_max = max(self.shift_max, float(shift_N.max()) if len(shift_N) else 0.0)

    def measures(self) -> dict[str, tuple[float | None, str]]:
        """Return what the cause changes: advantages, and the gradient in log-prob space."""
        recorded_l1, difference_l1, recorded_sq, made_sq, dot = self.gradient
        measures: dict[str, tuple[float | None, str]] = {}
        if self.moved:
            measures |= {
                "rows_changed": (self.moved, "rows"),
                "rows_changed_share": (ratio(self.moved, self.rows), "share"),
                "sign_flips": (self.flips, "rows"),
                "advantage_shift_mean": (ratio(self.shift, self.rows), "advantage"),
                "advantage_shift_max": (self.shift_max, "advantage"),
            }
        if difference_l1:
            measures |= {
                "relative_change_l1": (ratio(difference_l1, recorded_l1), "share"),
                "kappa": (ratio(dot, recorded_sq), "1"),
                "cosine": (ratio(dot, sqrt(made_sq) * sqrt(recorded_sq)), "1"),
            }
        return measures

    def cause(self, established: Established) -> Cause:
        """Return what was counted as a cause; its quantity is the one of most values."""
        explains = (
            name
            for name, tally in self.base.items()
            if tally.disagree and name in self.found and self.found[name].disagree < tally.disagree
        )
        quantity = max(
            sorted(established.quantities), key=lambda name: self.base[name].compared if name in self.base else 0
        )
        base, tally = self.base[quantity], self.found[quantity]
        return Cause(
            hypothesis=established.hypothesis.name,
            code=established.hypothesis.code,
            words=established.hypothesis.words,
            remedy=established.hypothesis.remedy,
            quantity=quantity,
            compared=tally.compared,
            as_recorded=base.agree,
            as_found=tally.agree,
            worst=tally.worst,
            explains=tuple(sorted(explains)),
            also=established.also,
            measures=self.measures(),
            steps=(min(self.steps), max(self.steps), len(set(self.steps))) if self.steps else None,
            references=established.hypothesis.references,
        )


def confirm(search: Search, steps: Iterable[Step], audit: AuditTally) -> Diagnosis:
    """Count over all steps how many values each cause explains, and how much it changes."""
    bounded = bounded_counts(audit, search.trainer, search.bounded)
    if not search.found and not bounded:
        return _with_factors(undiagnosed(audit))
    counts = [CauseCount() for _ in search.found]
    means: list[OpenWindows] = [{} for _ in range(len(counts) + 1)]
    last: AuditTally = {}
    for step in steps:
        tallies, evaluation = _count(search, step, counts, means)
        last = add_tallies(last, tallies)
        for each in bounded:
            each.add(step, tallies, evaluation, search.trainer)
    causes, fixes = [], dict[str, tuple[str, ...]]()
    for established, count in zip(search.found, counts, strict=True):
        if established.hypothesis.code == FIX_CODE:
            fixes |= {name: (*fixes.get(name, ()), established.hypothesis.name) for name in established.quantities}
        elif established.hypothesis is not AS_LOGGED:
            causes.append(count.cause(established))
    as_logged = AS_LOGGED in search.edits
    if as_logged:
        last = {name: tally for name, tally in last.items() if not name.startswith(STAGES[0])}
    off = {name: last.get(name, tally) for name, tally in audit.items() if tally.disagree}
    left = {name: tally for name, tally in off.items() if name not in last or tally.disagree}
    partly = frozenset(name for name in left if _follows(search, name, audit[name].stage))
    unexplained = {name: tally for name, tally in left.items() if name not in partly}
    agreeing = frozenset(off.keys() - left.keys()) if as_logged else frozenset[str]()
    diagnosis = with_bounds(Diagnosis(tuple(causes), fixes, unexplained, partly, agreeing), bounded, search.trainer)
    return _with_factors(diagnosis)


def _follows(search: Search, name: str, stage: str) -> bool:
    """True if a quantity is explained in part, or comes after one that is: the cause says how much is left."""
    partly = [cause for cause in search.found if cause.partly]
    return any(name in cause.quantities or STAGES.index(stage) > STAGES.index(cause.stage) for cause in partly)


def _count(
    search: Search, step: Step, counts: list[CauseCount], means: list[OpenWindows]
) -> tuple[AuditTally, Evaluation | None]:
    """Add a step to the counts of every cause; return its audit under all of them, and its evaluation."""
    base: AuditTally = {}
    before: Evaluation | None = None
    for place in range(len(counts) + 1):
        edits = search.edits[:place]
        after = step.evaluated(search.edited(edits), per_token=True)
        tallies: AuditTally = {}
        if after is not None:
            metrics = search.trainer.metrics(after)
            tallies, means[place] = search.audited(step, edits, after, metrics, means[place])
        if place:
            # Some faults are in some steps only.
            tallies = {name: _better(base.get(name), tally) for name, tally in tallies.items()}
            counts[place - 1].add(step.batch.step, base, tallies, before, after)
        base, before = tallies, after
    return base, before


def _with_factors(diagnosis: Diagnosis) -> Diagnosis:
    """Take the metrics that are off by one factor, or by one added term, for what they are.

    Metrics with the same factor in the same steps have one cause.
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, tally in diagnosis.unexplained.items():
        words = "" if tally.stage == STAGES[0] else factor_of(tally)
        more = added_term(tally) if tally.stage == "loss" and not words else ""
        if words or more:
            some = tally.steps_off < tally.steps and tally.first is not None
            where = f" in {tally.steps_off:,} of {tally.steps:,} steps" if some else ""
            alike.setdefault(("added-term" if more else "metric-scaled", words or more, where), []).append(name)
    explained = {name for names in alike.values() for name in names}
    return replace(
        diagnosis,
        causes=(*diagnosis.causes, *(_scaled(*key, names, diagnosis.unexplained) for key, names in alike.items())),
        unexplained={name: tally for name, tally in diagnosis.unexplained.items() if name not in explained},
    )


def _scaled(hypothesis: str, words: str, where: str, names: list[str], audit: AuditTally) -> Cause:
    """Return the cause of metrics that are off by the same factor or term."""
    # The loss before its parts, and a part before a KL.
    ordered = sorted(names, key=lambda name: (-STAGES.index(audit[name].stage), name))
    quantity, is_term = ordered[0], hypothesis == "added-term"
    tally = audit[quantity]
    listed = quantity if len(names) == 1 else f"{', '.join(ordered[:-1])} and {ordered[-1]}"
    return Cause(
        hypothesis=hypothesis,
        code="RDG005" if is_term else "RDM007",
        words=f"the logged {listed} {'is' if len(names) == 1 else 'are'} {words}{where}",
        remedy="look for a term that no option names, such as the load-balancing loss of a router"
        if is_term
        else remedy_of(words),
        quantity=quantity,
        compared=tally.compared,
        as_recorded=tally.agree,
        as_found=tally.compared,
        worst=1.0,
        explains=tuple(sorted(names)),
        steps=(tally.first[0], tally.last_off, tally.steps_off) if where and tally.first else None,
    )


def _better(base: QuantityTally | None, tally: QuantityTally) -> QuantityTally:
    if base is None or base.compared != tally.compared:
        return tally
    return base if not base.disagree or base.disagree < tally.disagree else tally

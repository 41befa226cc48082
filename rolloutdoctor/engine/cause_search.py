"""Try hypotheses on some steps, stage by stage, and count over all steps what those established."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2
from typing import Any, TypeVar

import torch

from rolloutdoctor.audit.doubts import Unjoined
from rolloutdoctor.audit.factors import added_term, factor_of
from rolloutdoctor.audit.logged import of_step, row_advantages
from rolloutdoctor.audit.step import audit_step, quantity_of, stage_of, window_values
from rolloutdoctor.audit.tally import ENOUGH_BITS, STAGES, AuditTally, QuantityTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows, join, opened
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.windows import Window
from rolloutdoctor.engine.cause_counts import CauseCount, cause_of
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, evaluate, evaluate_rows
from rolloutdoctor.hypotheses.advantage_fits import AS_LOGGED
from rolloutdoctor.hypotheses.hypothesis import Hypothesis, Seen
from rolloutdoctor.hypotheses.table import FAMILIES, FIX_CODE, HYPOTHESES
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.rules.base import Context

Found = TypeVar("Found")

ROUNDS = 3
"""Causes that one stage can have at most."""

PARTLY = 0.7
"""Share of the disagreeing values from which on a hypothesis is named that explains some of them.

A shift of a column that crosses the steps explains all groups of a step but one or two. Where rewards are 0 or 1, a
wrong hypothesis explains up to half of the disagreeing values by chance, those that are 0."""

PARTLY_VALUES = 32
"""Disagreeing values of a quantity below which a hypothesis has to explain all of them."""

MOST_BITS = 24.0
"""Of one value, those of float32."""


@dataclass(frozen=True)
class Diagnosis:
    """What the disagreements of an audit come from.

    Attributes:
        causes: what was established, in the order of the stages.
        fixes: quantity to the names of the known fixes with which its values agree.
        unexplained: quantity to its tally, where no hypothesis gives the logged values.
        partly: quantities of which a cause explains some values and not all, or that come after such ones.
        given: quantities that agree only where the logged advantages, which nothing explains, are taken as they are.
    """

    causes: tuple[Cause, ...] = ()
    fixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unexplained: AuditTally = field(default_factory=dict)
    partly: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class LoggedRows:
    """A step with what was logged at it, and the window that it is in."""

    batch: RolloutBatch
    logged: Mapping[str, float]
    window: Window | None = None


Trial = tuple[LoggedRows, ...]
"""One step, or all steps over which means were logged."""


@dataclass(frozen=True, eq=False)
class _Tried:
    """A step under some edits, and the trainer's metrics of it, each made when it is asked for."""

    evaluation: Evaluation
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class _Established:
    """A hypothesis, the quantities of a stage that it explains, and the names of those that explain the same."""

    hypothesis: Hypothesis
    stage: str
    quantities: frozenset[str]
    also: tuple[str, ...] = ()
    partly: bool = False


def undiagnosed(audit: AuditTally) -> Diagnosis:
    """Return the diagnosis where the rows are not at hand: every disagreement is unexplained."""
    return Diagnosis(unexplained={name: tally for name, tally in audit.items() if tally.disagree})


def applicable(context: Context) -> tuple[Hypothesis, ...]:
    """Return the hypotheses that could change something of the recorded objective."""
    objective = context.objective
    return () if objective is None else tuple(one for one in HYPOTHESES if one.applies(objective))


class Search:
    """Tries hypotheses on some steps, stage by stage, and counts over all steps what those established."""

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        assert context.objective is not None
        assert context.trainer is not None
        self._context, self._dtype = context, dtype
        self._objective, self._trainer = context.objective, context.trainer
        self._found: list[_Established] = []
        self._off = frozenset[str]()
        # While hypotheses are tried, what each gives for a step: a later stage tries those of the earlier ones again,
        # and many change a metric alone.
        self._kept: dict[Hashable, Any] | None = None

    def audit(
        self, trial: Trial, edits: Sequence[Hypothesis], until: str = STAGES[-1], only: set[str] | None = None
    ) -> AuditTally:
        """Audit steps under some edits, up to a stage, or `only` some quantities; empty where that fails."""
        names, wanted = tuple(one.name for one in edits), None if only is None else frozenset(only)
        key = ("audit", tuple(map(id, trial)), names, until, wanted)
        return self._remembered(key, lambda: self._audit(trial, edits, until, only))

    def _remembered(self, key: Hashable, make: Callable[[], Found]) -> Found:
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        found: Found = self._kept[key]
        return found

    def _audit(self, trial: Trial, edits: Sequence[Hypothesis], until: str, only: set[str] | None) -> AuditTally:
        total: AuditTally = {}
        means: OpenWindows = {}
        for step in trial:
            tried = self._tried(step, edits, rows_only=until == STAGES[0])
            if tried is None:
                return {}
            found, means = self._audited(step, tried, edits, means, until, only)
            total = add_tallies(total, found)
        return total

    def _tried(
        self, step: LoggedRows, edits: Sequence[Hypothesis], *, rows_only: bool = False, per_token: bool = False
    ) -> _Tried | None:
        """A step under some edits; None where it cannot be evaluated."""
        evaluated = tuple(one.name for one in edits if one.evaluates)
        key = ("tried", id(step), evaluated, rows_only, per_token)
        return self._remembered(key, lambda: self._try(step, edits, rows_only=rows_only, per_token=per_token))

    def _try(self, step: LoggedRows, edits: Sequence[Hypothesis], *, rows_only: bool, per_token: bool) -> _Tried | None:
        try:
            found = self._evaluated(step, edits, rows_only=rows_only, per_token=per_token)
        except (CannotComputeError, UsageError):
            return None
        return None if found is None else _Tried(found, self._trainer.metrics(found))

    def _audited(
        self,
        step: LoggedRows,
        tried: _Tried,
        edits: Sequence[Hypothesis],
        means: OpenWindows,
        until: str = STAGES[-1],
        only: set[str] | None = None,
    ) -> tuple[AuditTally, OpenWindows]:
        """The audit of a step, with the means that end there, given those that began before; and those that go on."""
        # Some metrics take longer than the loss: only those are made that are compared.
        evaluation, made, stages = tried.evaluation, tried.metrics, STAGES[: STAGES.index(until) + 1]
        # A line that may be of other rows explains nothing.
        unjoined = Unjoined(step.batch, self._trainer, self._context.config).among(step.logged)
        at_step = {name: value for name, value in step.logged.items() if name not in unjoined}
        wanted = [*at_step, *(step.window.values if step.window is not None else ())]
        names = [name for name in wanted if stage_of(self._trainer, name) in stages and name in made]
        if only is not None:
            names = [name for name in names if quantity_of(step.batch, name) in only]
        metrics = {name: made[name] for name in names}
        for edit in edits:
            if edit.metrics is not None:
                metrics |= edit.metrics(evaluation, self._trainer, metrics)
        config, digits = self._context.config, self._context.digits
        logged = of_step(step.batch, at_step, evaluation.objective, digits)
        compared = stages if only is None else (until,)
        found = audit_step(logged, evaluation, self._trainer, config, metrics, in_doubt=True, stages=compared)
        if step.window is None:
            return found, means
        values = window_values(logged, evaluation, self._trainer, config, metrics, in_doubt=True)
        closed, means = join(means, opened(step.window, step.batch.step, values, digits))
        return add_tallies(found, closed), means

    def _evaluated(
        self, step: LoggedRows, edits: Sequence[Hypothesis], *, rows_only: bool, per_token: bool
    ) -> Evaluation | None:
        batch, objective = step.batch, self._objective
        for edit in edits:
            if edit.objective is not None:
                objective = edit.objective(objective)
            if edit.rows is not None:
                batch = edit.rows(batch, objective) or batch

        def amend(rows: RowResult) -> RowResult:
            for edit in edits:
                logged_N = None if edit.advantages is None else self._row_advantages(step)
                if edit.advantages is None or logged_N is None or rows.advantage_N is None:
                    continue
                made = edit.advantages(Evaluation(batch, rows.objective, rows, None, self._dtype), logged_N)
                if made is not None:
                    rows = replace(rows, advantage_N=made[0], edited_radius=made[1])
            return rows

        if not rows_only:
            return evaluate(batch, objective, dtype=self._dtype, logged=step.logged, per_token=per_token, amend=amend)
        objective = objective.at_step(step.logged)
        rows = evaluate_rows(batch, objective, self._dtype)
        return None if rows is None else Evaluation(batch, objective, amend(rows), None, self._dtype)

    def _row_advantages(self, step: LoggedRows) -> torch.Tensor | None:
        key = ("logged", id(step))
        return self._remembered(key, lambda: row_advantages(of_step(step.batch, {}, self._objective)))

    def _solved(self, trials: Sequence[Trial], stage: str) -> list[Hypothesis]:
        """What the families of a stage suggest."""
        families = [one for one in FAMILIES if one.stage == stage and one.applies(self._objective)]
        seen: list[list[Seen]] = []
        for trial in trials if families else ():
            tried = [self._tried(step, self._edits, rows_only=stage == STAGES[0]) for step in trial]
            seen.append(
                [
                    Seen(
                        one.evaluation,
                        self._row_advantages(step),
                        step.logged if step.window is None else {**step.logged, **step.window.values},
                        self._trainer,
                    )
                    for step, one in zip(trial, tried, strict=True)
                    if one is not None
                ]
            )
        found = [one for family in families for one in family.solve([each for each in seen if each])]
        return [one for one in found if one not in self._edits]

    def try_on(self, trials: Sequence[Trial], off: Collection[str]) -> None:
        """Establish what explains the disagreements of some steps, stage by stage.

        Args:
            trials: the steps.
            off: quantities to explain. Of others a value may be in doubt at a step, and follow at the rest.
        """
        self._off = frozenset(off)
        self._kept = {}
        self._try_stages(trials, STAGES)
        if not self._found and any(name.startswith(STAGES[0]) for name in self._left(trials, STAGES[0])):
            # A loss that follows from the logged advantages is no second fault.
            self._found.append(_Established(AS_LOGGED, STAGES[0], frozenset()))
            self._kept.clear()
            self._try_stages(trials, STAGES[1:])
        self._kept = None

    def _try_stages(self, trials: Sequence[Trial], stages: Sequence[str]) -> None:
        candidates, unexplained = applicable(self._context), set[str]()
        for stage in stages:
            # An edit that leaves its own stage unexplained explains a later one by chance.
            reaching = [
                one
                for one in candidates
                if STAGES.index(one.stage) <= STAGES.index(stage)
                and (one.stage not in unexplained or not self._left(trials, one.stage, one))
            ]
            for _ in range(ROUNDS):
                best = self._best(trials, stage, reaching)
                if best is None:
                    break
                self._found.append(best)
                assert self._kept is not None  # while hypotheses are tried
                self._kept.clear()
            if self._left(trials, stage):
                unexplained.add(stage)

    def _left(self, trials: Sequence[Trial], stage: str, *more: Hypothesis) -> set[str]:
        """The quantities of a stage that disagree under the edits that are established, and some more."""
        counts = _disagreeing([self.audit(trial, (*self._edits, *more), stage) for trial in trials], stage)
        return {name for name, count in counts.items() if count and name in self._off}

    @property
    def _edits(self) -> list[Hypothesis]:
        return [one.hypothesis for one in self._found]

    def _best(self, trials: Sequence[Trial], stage: str, candidates: Sequence[Hypothesis]) -> _Established | None:
        """The hypothesis that explains most quantities of a stage, and the others that explain the same."""
        before, off = [self.audit(trial, self._edits, stage) for trial in trials], self._left(trials, stage)
        if not off:
            return None
        candidates = self._possible(trials[0], candidates, stage)
        explained = self._explaining(trials, before, off, candidates, stage)
        if not explained:
            solved = self._solved(trials, stage)
            explained = self._explaining(trials, before, off, solved, stage)
            if not explained:
                return self._best_of_parts(trials, before, stage, [*candidates, *solved])
        most = max(len(quantities) for quantities in explained.values())
        rivals = [one for one, quantities in explained.items() if len(quantities) == most]
        best = rivals[0]
        if len(rivals) > 1:
            # Of those that explain as much here the one that explains more of what follows.
            agreeing = {one: self._agreeing(trials[0], one) for one in rivals}
            best = max(rivals, key=lambda one: agreeing[one])
            rivals = [one for one in rivals if agreeing[one] == agreeing[best]]
        also = tuple(one.name for one in rivals if explained[one] == explained[best] and one != best)
        return _Established(best, stage, explained[best], also)

    def _explaining(
        self,
        trials: Sequence[Trial],
        before: Sequence[AuditTally],
        off: set[str],
        candidates: Sequence[Hypothesis],
        stage: str,
    ) -> dict[Hypothesis, frozenset[str]]:
        """The candidates that break nothing, to the quantities that they explain."""
        explained = {}
        of_rows = {name for name in off if name.startswith("advantages")}
        for one in candidates:
            quantities = self._explained(trials, before, off, one, stage)
            if of_rows and not of_rows & quantities:
                continue  # the extremes and the mean of a step are the same for many advantages
            if quantities and not any(self._breaks(trial, one) for trial in trials):
                explained[one] = quantities
        return explained

    def _possible(self, trial: Trial, candidates: Sequence[Hypothesis], stage: str) -> list[Hypothesis]:
        """The candidates that are not established, and do not break advantages that agree: that takes no tokens."""
        found = [one for one in candidates if one not in self._edits]
        first = STAGES[0]
        if stage == first:
            return found
        agreeing = {name for name, tally in self.audit(trial, self._edits, first).items() if not tally.disagree}

        def breaks(one: Hypothesis) -> bool:
            after = self.audit(trial, (*self._edits, one), first)
            return any(after[name].disagree and self._claims(one, name) for name in agreeing & after.keys())

        return [one for one in found if one.stage != first or not agreeing or not breaks(one)]

    def _best_of_parts(
        self, trials: Sequence[Trial], before: Sequence[AuditTally], stage: str, candidates: Sequence[Hypothesis]
    ) -> _Established | None:
        """The hypothesis that leaves the fewest values of a quantity unexplained, if it explains most of them."""
        before_edit = _disagreeing(before, stage).items()
        off = {name: count for name, count in before_edit if count >= PARTLY_VALUES and name in self._off}
        left: dict[Hypothesis, tuple[float, frozenset[str]]] = {}
        for one in candidates if off else ():
            if one.advantages is not None:
                continue
            after = [self.audit(trial, (*self._edits, one), stage, only=set(off)) for trial in trials]
            if any(base.keys() & off.keys() - found.keys() for base, found in zip(before, after, strict=True)):
                continue
            counts = _disagreeing(after, stage)
            shares = {name: counts.get(name, 0) / count for name, count in off.items()}
            explained = frozenset(name for name, share in shares.items() if share <= 1 - PARTLY)
            if explained and max(shares.values()) <= 1 and not any(self._breaks(trial, one) for trial in trials):
                left[one] = sum(shares.values()), explained
        if not left:
            return None
        best = min(left, key=lambda one: left[one][0])
        also = tuple(one.name for one in left if left[one] == left[best] and one != best)
        return _Established(best, stage, left[best][1], also, partly=True)

    def _breaks(self, trial: Trial, one: Hypothesis) -> bool:
        """True if a quantity of any stage that agrees at a step does not under one more edit."""
        before, after = self.audit(trial, self._edits), self.audit(trial, (*self._edits, one))
        broken = (name for name, tally in before.items() if not tally.disagree and name in after)
        return any(after[name].disagree and self._claims(one, name) for name in broken)

    def _claims(self, one: Hypothesis, quantity: str) -> bool:
        """False for what an edit redefines without claiming that the trainer did: that it agrees says nothing."""
        return self._trainer.kind_of(quantity.removesuffix(" (eval)")) not in one.unclaimed

    def _agreeing(self, trial: Trial, one: Hypothesis) -> int:
        """How many quantities of all stages agree at a step under one more edit."""
        return sum(not tally.disagree for tally in self.audit(trial, (*self._edits, one)).values())

    def _explained(
        self, trials: Sequence[Trial], before: Sequence[AuditTally], off: set[str], one: Hypothesis, stage: str
    ) -> frozenset[str]:
        """The quantities that agree in every step under one more edit, where they did not, if that says enough."""
        left = set(off)
        bits: dict[str, dict[float, float]] = {name: {} for name in off}
        for trial, base in zip(trials, before, strict=True):
            disagreeing = {name for name in off if name in base and base[name].disagree}
            if not disagreeing:
                continue
            found = self.audit(trial, (*self._edits, one), stage, only=off)
            left -= disagreeing - {name for name, tally in found.items() if tally.compared and not tally.disagree}
            if not left:
                break
            for name in left & disagreeing:
                first = base[name].first
                assert first is not None  # a value disagrees
                bits[name][first[2]] = _bits(base[name], found[name])
        return frozenset(name for name in left if sum(bits[name].values()) >= ENOUGH_BITS)

    def confirm(self, steps: Iterable[LoggedRows], audit: AuditTally) -> Diagnosis:
        """Count over all steps how many values each cause explains, and how much it changes."""
        counts = [CauseCount() for _ in self._found]
        means: list[OpenWindows] = [{} for _ in range(len(self._found) + 1)]
        last: AuditTally = {}
        if not self._found:
            return _with_factors(undiagnosed(audit))
        for step in steps:
            last = add_tallies(last, self._count(step, counts, means))
        causes = []
        fixes: dict[str, tuple[str, ...]] = {}
        for one, count in zip(self._found, counts, strict=True):
            if one.hypothesis is AS_LOGGED:
                continue
            if one.hypothesis.code == FIX_CODE:
                for name in one.quantities:
                    fixes[name] = (*fixes.get(name, ()), one.hypothesis.name)
            else:
                causes.append(cause_of(one.hypothesis, one.quantities, one.also, count))
        if AS_LOGGED in self._edits:
            last = {name: tally for name, tally in last.items() if not name.startswith(STAGES[0])}
        left = {
            name: last.get(name, tally)
            for name, tally in audit.items()
            if tally.disagree and (name not in last or last[name].disagree)
        }
        partly = frozenset(name for name in left if self._follows(name, audit[name]))
        unexplained = {name: tally for name, tally in left.items() if name not in partly}
        given = frozenset(name for name, tally in audit.items() if tally.disagree and name not in left)
        given = given if AS_LOGGED in self._edits else frozenset()
        return _with_factors(Diagnosis(tuple(causes), fixes, unexplained, partly, given))

    def _follows(self, name: str, tally: QuantityTally) -> bool:
        """True if a quantity is explained in part, or comes after one that is: the cause says how much is left."""
        partly = [one for one in self._found if one.partly]
        return any(name in one.quantities or STAGES.index(tally.stage) > STAGES.index(one.stage) for one in partly)

    def _count(self, step: LoggedRows, counts: Sequence[CauseCount], means: list[OpenWindows]) -> AuditTally:
        """Add a step to the counts of every cause; return its audit under all of them."""
        edits: list[Hypothesis] = []
        before = self._tried(step, edits, per_token=True)
        base = self._counted(step, before, edits, means)
        for one, count in zip(self._edits, counts, strict=True):
            edits.append(one)
            after = self._tried(step, edits, per_token=True)
            found = self._counted(step, after, edits, means)
            # Some faults are in some steps only.
            found = {name: _better(base.get(name), tally) for name, tally in found.items()}
            count.add(step.batch, base, found, *(None if each is None else each.evaluation for each in (before, after)))
            base, before = found, after
        return base

    def _counted(
        self, step: LoggedRows, tried: _Tried | None, edits: Sequence[Hypothesis], means: list[OpenWindows]
    ) -> AuditTally:
        if tried is None:
            return {}
        found, means[len(edits)] = self._audited(step, tried, edits, means[len(edits)])
        return found


def _with_factors(diagnosis: Diagnosis) -> Diagnosis:
    """Take the metrics that are off by one factor, or by one added term, for what they are."""
    found, unexplained = list(diagnosis.causes), dict(diagnosis.unexplained)
    for name, tally in diagnosis.unexplained.items():
        words = "" if tally.stage == STAGES[0] else factor_of(tally)
        more = added_term(tally) if tally.stage == "loss" and not words else ""
        if not words and not more:
            continue
        some = tally.steps_off < tally.steps and tally.first is not None
        where = f" in {tally.steps_off:,} of {tally.steps:,} steps" if some else ""
        del unexplained[name]
        found.append(
            Cause(
                hypothesis="added-term" if more else "metric-scaled",
                code="RDG005" if more else "RDM007",
                words=f"the logged {name} is {words or more}{where}",
                remedy="look for a term that no option names, such as the load-balancing loss of a router"
                if more
                else "divide once: look for the number of micro-batches, ranks or accumulation steps of that size",
                quantity=name,
                compared=tally.compared,
                as_recorded=tally.agree,
                as_found=tally.compared,
                worst=1.0,
                explains=(name,),
                steps=(tally.first[0], tally.last_off, tally.steps_off) if some and tally.first else None,
            )
        )
    return replace(diagnosis, causes=tuple(found), unexplained=unexplained)


def _bits(before: QuantityTally, after: QuantityTally) -> float:
    """What the values of a quantity say for an edit with which they agree."""
    if not (before.telling and 0 < after.radius < inf and 0 < before.radius < inf):
        return 0.0
    wider = log2(after.radius / before.radius)
    return min(max(before.bits / before.telling - wider, 0.0), MOST_BITS) * before.telling


def _better(base: QuantityTally | None, found: QuantityTally) -> QuantityTally:
    if base is None or base.compared != found.compared:
        return found
    return base if not base.disagree or base.disagree < found.disagree else found


def _disagreeing(audits: Iterable[AuditTally], stage: str) -> dict[str, int]:
    """How many values of each quantity of a stage disagree, over some steps."""
    total: dict[str, int] = {}
    for audit in audits:
        for name, tally in audit.items():
            if tally.stage == stage:
                total[name] = total.get(name, 0) + tally.disagree
    return total

"""Find what a trainer computed instead, where its log does not follow from the rows and the recorded options.

A hypothesis is an audit under an edit. The stages of the audit are gone through in the order in which a trainer
computes: what is established at one stage holds for those after it, so that wrong advantages are not taken for a wrong
loss. Hypotheses are tried on some of the steps that disagree, and what explains those is counted over all steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch

from rolloutdoctor.audit.factors import factor_of
from rolloutdoctor.audit.logged import of_step
from rolloutdoctor.audit.step import audit_step, quantity_of, stage_of
from rolloutdoctor.audit.tally import STAGES, AuditTally, QuantityTally, add_tallies
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_rows
from rolloutdoctor.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.hypotheses.table import FIX_CODE, HYPOTHESES
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.ops.elementwise import unwarned
from rolloutdoctor.ops.tally import ratio
from rolloutdoctor.ops.threads import one_torch_thread
from rolloutdoctor.results.audit import Cause
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.rules.base import Context

TRIAL_TOKENS = 300_000
"""Tokens of the steps on which every hypothesis is tried."""

TRIAL_STEPS = 16

ROUNDS = 3
"""Causes that one stage can have at most."""

Batches = Callable[[], Iterable[RolloutBatch]]
"""Reads the steps of a run from the start; called twice at most."""


@dataclass(frozen=True)
class Diagnosis:
    """What the disagreements of an audit come from.

    Attributes:
        causes: what was established, in the order of the stages.
        fixes: quantity to the names of the known fixes with which its values agree.
        unexplained: quantity to its tally, where no hypothesis gives the logged values.
    """

    causes: tuple[Cause, ...] = ()
    fixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unexplained: AuditTally = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Step:
    batch: RolloutBatch
    logged: Mapping[str, float]


def undiagnosed(audit: AuditTally) -> Diagnosis:
    """Return the diagnosis where the rows are not at hand: every disagreement is unexplained."""
    return Diagnosis(unexplained={name: tally for name, tally in audit.items() if tally.disagree})


def columns_for_causes(context: Context) -> frozenset[str]:
    """Columns that the hypotheses read beyond those of a check."""
    return frozenset().union(*(one.columns for one in _applicable(context))) & context.columns


def find_causes(
    batches: Batches, metrics: LoggedMetrics, context: Context, audit: AuditTally, dtype: torch.dtype
) -> Diagnosis:
    """Explain the disagreements of an audit.

    Args:
        batches: reads the steps, with the columns of the check and those of `columns_for_causes`.
        metrics: the logged metrics that can be compared with one step.
        context: trainer, options and objective of the run.
        audit: how its logged values compare with the recomputed ones.
        dtype: of the token values.
    """
    doubted = {name for name, tally in audit.items() if tally.not_compared and not tally.compared}
    off = {name for name, tally in audit.items() if tally.disagree} | doubted
    if not off or context.objective is None:
        return Diagnosis()
    search = _Search(context, dtype)
    search.try_on(_chosen(batches, metrics, search, off))
    return search.confirm((_Step(batch, metrics.at(batch.key)) for batch in batches()), audit)


def causes_of_run(prepared: PreparedRun, audit: AuditTally) -> Diagnosis:
    """Explain the disagreements of the audit of a run; its steps are read again only if there are any.

    Raises:
        InputError: if a file cannot be read any more.
    """
    options, plan = prepared.options, prepared.plan
    dtype = find_dtype(options.dtype)
    columns = plan.columns | columns_for_causes(plan.context)

    def batches() -> Iterable[RolloutBatch]:
        return prepared.run.batches(columns, steps=options.steps, split=options.split, dtype=dtype)

    with one_torch_thread(), unwarned():
        return find_causes(batches, prepared.metrics, plan.context, audit, dtype)


def _applicable(context: Context) -> tuple[Hypothesis, ...]:
    objective = context.objective
    return () if objective is None else tuple(one for one in HYPOTHESES if one.applies(objective))


def _chosen(batches: Batches, metrics: LoggedMetrics, search: "_Search", off: set[str]) -> list[_Step]:
    """The first steps that disagree, up to a number of tokens; one at least."""
    chosen: list[_Step] = []
    tokens = 0
    for batch in batches():
        step = _Step(batch, metrics.at(batch.key))
        found = search.audit(step, ())
        if not any(found[name].disagree for name in off & found.keys()):
            continue
        if chosen and (tokens + batch.tokens > TRIAL_TOKENS or len(chosen) >= TRIAL_STEPS):
            break
        chosen.append(step)
        tokens += batch.tokens
    return chosen


class _Search:
    """Tries hypotheses on some steps, stage by stage, and counts over all steps what those established."""

    def __init__(self, context: Context, dtype: torch.dtype) -> None:
        assert context.objective is not None
        assert context.trainer is not None
        self._context, self._dtype = context, dtype
        self._objective, self._trainer = context.objective, context.trainer
        self._found: list[tuple[Hypothesis, frozenset[str], tuple[str, ...]]] = []

    def audit(
        self, step: _Step, edits: Sequence[Hypothesis], until: str = STAGES[-1], only: set[str] | None = None
    ) -> AuditTally:
        """Audit a step under some edits, up to a stage, or `only` some quantities; empty where it fails."""
        try:
            evaluation = self._evaluated(step, edits, rows_only=until == STAGES[0])
        except (CannotComputeError, UsageError):
            return {}
        return {} if evaluation is None else self._audited(step, evaluation, edits, until, only)

    def _audited(
        self,
        step: _Step,
        evaluation: Evaluation,
        edits: Sequence[Hypothesis],
        until: str = STAGES[-1],
        only: set[str] | None = None,
    ) -> AuditTally:
        # Some metrics take longer than the loss: only those are made that are compared.
        made, stages = self._trainer.metrics(evaluation), STAGES[: STAGES.index(until) + 1]
        names = [name for name in step.logged if stage_of(self._trainer, name) in stages and name in made]
        if only is not None:
            names = [name for name in names if quantity_of(step.batch, name) in only]
        metrics = {name: made[name] for name in names}
        for edit in edits:
            if edit.metrics is not None:
                metrics |= edit.metrics(evaluation, self._trainer, metrics)
        logged = of_step(step.batch, step.logged, evaluation.objective, self._context.spacing)
        return audit_step(logged, evaluation, self._trainer, self._context.config, metrics, in_doubt=True)

    def _evaluated(
        self, step: _Step, edits: Sequence[Hypothesis], *, rows_only: bool = False, per_token: bool = False
    ) -> Evaluation | None:
        batch, objective = step.batch, self._objective
        for edit in edits:
            if edit.objective is not None:
                objective = edit.objective(objective)
            if edit.rows is not None:
                batch = edit.rows(batch, objective) or batch
        if not rows_only:
            return evaluate(batch, objective, dtype=self._dtype, logged=step.logged, per_token=per_token)
        objective = objective.at_step(step.logged)
        rows = evaluate_rows(batch, objective, self._dtype)
        return None if rows is None else Evaluation(batch, objective, rows, None, self._dtype)

    def try_on(self, steps: Sequence[_Step]) -> None:
        """Establish what explains the disagreements of some steps, stage by stage."""
        candidates = _applicable(self._context)
        for number, stage in enumerate(STAGES):
            reaching = [one for one in candidates if STAGES.index(one.stage) <= number]
            for _ in range(ROUNDS):
                best = self._best(steps, stage, reaching)
                if best is None:
                    break
                self._found.append(best)

    @property
    def _edits(self) -> list[Hypothesis]:
        return [hypothesis for hypothesis, _, _ in self._found]

    def _best(
        self, steps: Sequence[_Step], stage: str, candidates: Sequence[Hypothesis]
    ) -> tuple[Hypothesis, frozenset[str], tuple[str, ...]] | None:
        """The hypothesis that explains most quantities of a stage, and the others that explain the same."""
        before = [self.audit(step, self._edits, stage) for step in steps]
        off = {name for found in before for name, tally in found.items() if tally.stage == stage and tally.disagree}
        if not off:
            return None
        explained = {}
        for one in candidates:
            if one in self._edits:
                continue
            quantities = self._explained(steps, before, off, one, stage)
            if quantities and not any(self._breaks(step, one) for step in steps):
                explained[one] = quantities
        if not explained:
            return None
        most = max(len(quantities) for quantities in explained.values())
        rivals = [one for one, quantities in explained.items() if len(quantities) == most]
        best = rivals[0]
        if len(rivals) > 1:
            # Of those that explain as much here the one that explains more of what follows.
            agreeing = {one: self._agreeing(steps[0], one) for one in rivals}
            best = max(rivals, key=lambda one: agreeing[one])
            rivals = [one for one in rivals if agreeing[one] == agreeing[best]]
        also = tuple(one.name for one in rivals if explained[one] == explained[best] and one != best)
        return best, explained[best], also

    def _breaks(self, step: _Step, one: Hypothesis) -> bool:
        """True if a quantity of any stage that agrees at a step does not under one more edit."""
        before, after = self.audit(step, self._edits), self.audit(step, (*self._edits, one))
        return any(not tally.disagree and name in after and after[name].disagree for name, tally in before.items())

    def _agreeing(self, step: _Step, one: Hypothesis) -> int:
        """How many quantities of all stages agree at a step under one more edit."""
        return sum(not tally.disagree for tally in self.audit(step, (*self._edits, one)).values())

    def _explained(
        self, steps: Sequence[_Step], before: Sequence[AuditTally], off: set[str], one: Hypothesis, stage: str
    ) -> frozenset[str]:
        """The quantities that agree in every step under one more edit, where they did not."""
        alive = set(off)
        for step, base in zip(steps, before, strict=True):
            disagreeing = {name for name in off if name in base and base[name].disagree}
            if not disagreeing:
                continue
            found = self.audit(step, (*self._edits, one), stage, only=off)
            alive -= disagreeing - {name for name, tally in found.items() if tally.compared and not tally.disagree}
            if not alive:
                break
        return frozenset(alive)

    def confirm(self, steps: Iterable[_Step], audit: AuditTally) -> Diagnosis:
        """Count over all steps how many values each cause explains, and how much it changes."""
        counts = [_Count() for _ in self._found]
        last: AuditTally = {}
        if not self._found:
            return _with_factors(undiagnosed(audit))
        for step in steps:
            last = add_tallies(last, self._count(step, counts))
        causes = []
        fixes: dict[str, tuple[str, ...]] = {}
        for (one, quantities, also), count in zip(self._found, counts, strict=True):
            if one.code == FIX_CODE:
                for name in quantities:
                    fixes[name] = (*fixes.get(name, ()), one.name)
            else:
                causes.append(_cause(one, quantities, also, count))
        unexplained = {
            name: last.get(name, tally)
            for name, tally in audit.items()
            if tally.disagree and (name not in last or last[name].disagree)
        }
        return _with_factors(Diagnosis(tuple(causes), fixes, unexplained))

    def _count(self, step: _Step, counts: "Sequence[_Count]") -> AuditTally:
        """Add a step to the counts of every cause; return its audit under all of them."""
        edits: list[Hypothesis] = []
        before = self._try_evaluated(step, edits)
        base = {} if before is None else self._audited(step, before, edits)
        for one, count in zip(self._edits, counts, strict=True):
            edits.append(one)
            after = self._try_evaluated(step, edits)
            found = {} if after is None else self._audited(step, after, edits)
            # Some faults are in some steps only.
            found = {name: _better(base.get(name), tally) for name, tally in found.items()}
            count.add(step.batch, base, found, before, after)
            base, before = found, after
        return base

    def _try_evaluated(self, step: _Step, edits: Sequence[Hypothesis]) -> Evaluation | None:
        try:
            return self._evaluated(step, edits, per_token=True)
        except (CannotComputeError, UsageError):
            return None


def _with_factors(diagnosis: Diagnosis) -> Diagnosis:
    """Take the metrics that are off by one factor in every step for scaled ones."""
    found, unexplained = list(diagnosis.causes), dict(diagnosis.unexplained)
    for name, tally in diagnosis.unexplained.items():
        words = "" if tally.stage == STAGES[0] else factor_of(tally)
        if not words:
            continue
        del unexplained[name]
        found.append(
            Cause(
                hypothesis="metric-scaled",
                code="RDM007",
                words=f"the logged {name} is {words}",
                remedy="divide once: look for the number of micro-batches, ranks or accumulation steps of that size",
                quantity=name,
                compared=tally.compared,
                as_recorded=tally.agree,
                as_found=tally.compared,
                worst=1.0,
                explains=(name,),
            )
        )
    return Diagnosis(tuple(found), diagnosis.fixes, unexplained)


def _better(base: QuantityTally | None, found: QuantityTally) -> QuantityTally:
    return base if base is not None and base.compared == found.compared and not base.disagree else found


class _Count:
    """What a cause explains and changes, over the steps of a run."""

    def __init__(self) -> None:
        self.base: AuditTally = {}
        self.found: AuditTally = {}
        self.steps: list[int] = []
        self.rows = self.moved = self.flips = 0
        self.shift = self.shift_max = 0.0
        self.gradient = [0.0] * 5

    def add(
        self,
        batch: RolloutBatch,
        base: AuditTally,
        found: AuditTally,
        before: Evaluation | None,
        after: Evaluation | None,
    ) -> None:
        """Add one step, audited and evaluated before and after the edit."""
        self.base, self.found = add_tallies(self.base, base), add_tallies(self.found, found)
        if any(tally.disagree and name in found and not found[name].disagree for name, tally in base.items()):
            self.steps.append(batch.step)
        if before is None or after is None:
            return
        self._advantages(before, after)
        if before.per_token is None or after.per_token is None:
            return
        recorded_T, made_T = before.per_token.grad_T.double(), after.per_token.grad_T.double()
        difference_T = made_T - recorded_T
        sums = (recorded_T.abs(), difference_T.abs(), recorded_T.square(), made_T.square(), recorded_T * made_T)
        for place, x_T in enumerate(sums):
            self.gradient[place] += float(x_T.nan_to_num(0.0).sum())

    def _advantages(self, before: Evaluation, after: Evaluation) -> None:
        if before.rows is None or after.rows is None:
            return
        old_N, new_N = before.rows.advantage_N, after.rows.advantage_N
        if old_N is None or new_N is None:
            return
        shift_N = (new_N - old_N).abs().nan_to_num(0.0)
        self.rows += len(shift_N)
        self.moved += int((shift_N > 1e-6 * old_N.abs().nan_to_num(0.0).clamp(min=1e-6)).sum())
        self.flips += int((old_N * new_N < 0).sum())
        self.shift += float(shift_N.sum())
        self.shift_max = max(self.shift_max, float(shift_N.max()) if len(shift_N) else 0.0)

    def measures(self) -> dict[str, tuple[float | None, str]]:
        """How much the cause changes: advantages, and the gradient in log-prob space."""
        recorded_l1, difference_l1, recorded_sq, made_sq, dot = self.gradient
        found: dict[str, tuple[float | None, str]] = {}
        if self.moved:
            found |= {
                "rows_changed": (self.moved, "rows"),
                "rows_changed_share": (ratio(self.moved, self.rows), "share"),
                "sign_flips": (self.flips, "rows"),
                "advantage_shift_mean": (ratio(self.shift, self.rows), "advantage"),
                "advantage_shift_max": (self.shift_max, "advantage"),
            }
        if difference_l1:
            found |= {
                "relative_change_l1": (ratio(difference_l1, recorded_l1), "share"),
                "kappa": (ratio(dot, recorded_sq), "1"),
                "cosine": (ratio(dot, sqrt(made_sq) * sqrt(recorded_sq)), "1"),
            }
        return found


def _cause(one: Hypothesis, quantities: frozenset[str], also: tuple[str, ...], count: _Count) -> Cause:
    """Turn the counts of a hypothesis into a cause; its quantity is the one of most values."""
    explains = tuple(
        sorted(
            name
            for name, tally in count.base.items()
            if tally.disagree and name in count.found and count.found[name].disagree < tally.disagree
        )
    )
    quantity = max(sorted(quantities), key=lambda name: count.base[name].compared if name in count.base else 0)
    base, found = count.base[quantity], count.found[quantity]
    return Cause(
        hypothesis=one.name,
        code=one.code,
        words=one.words,
        remedy=one.remedy,
        quantity=quantity,
        compared=found.compared,
        as_recorded=base.agree,
        as_found=found.agree,
        worst=found.worst,
        explains=explains,
        also=also,
        measures=count.measures(),
        steps=(min(count.steps), max(count.steps), len(set(count.steps))) if count.steps else None,
        references=one.references,
    )

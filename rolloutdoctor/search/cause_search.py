"""Try hypotheses on some steps, stage by stage: each is the recorded candidate with one more edit."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.audit.doubts import Unjoined
from rolloutdoctor.audit.step import quantity_of, stage_of, window_values
from rolloutdoctor.audit.tally import ENOUGH_BITS, AuditTally, QuantityTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows, join, opened
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.data.windows import Window
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.search.candidates import Candidate
from rolloutdoctor.search.hypotheses.advantage_fits import AS_LOGGED
from rolloutdoctor.search.hypotheses.bounded import BOUNDED, BoundedHypothesis
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, Seen
from rolloutdoctor.search.hypotheses.table import FAMILIES, HYPOTHESES
from rolloutdoctor.search.step import Step

if TYPE_CHECKING:
    from rolloutdoctor.rules.base import Context

ROUNDS = 3
"""Causes that one stage can have at most."""

PARTLY = 0.7
"""Share of the disagreeing values from which on a hypothesis is named that explains some of them.

A shift of a column that crosses the steps explains all groups of a step but one or two. Where rewards are 0 or 1, a
wrong hypothesis explains up to half of the disagreeing values by chance, those that are 0."""

PARTLY_VALUES = 32
"""Disagreeing values of a quantity below which a hypothesis has to explain all of them."""

MOST_ZERO_BITS = 3.0
"""Of one value that is 0: three steps in which the recorded options give another number are enough."""

MOST_BITS = 24.0
"""Of one value, those of float32."""


Trial = tuple[Step, ...]
"""One step, or all steps over which means were logged."""


@dataclass(frozen=True)
class Established:
    """A hypothesis, the quantities of a stage that it explains, and the names of those that explain the same."""

    hypothesis: Hypothesis
    stage: str
    quantities: frozenset[str]
    also: tuple[str, ...] = ()
    partly: bool = False


def applicable(context: "Context") -> tuple[Hypothesis, ...]:
    """Return the hypotheses that could change something of the recorded objective."""
    objective = context.objective
    return () if objective is None else tuple(hypothesis for hypothesis in HYPOTHESES if hypothesis.applies(objective))


class Search:
    """Tries hypotheses on some steps, stage by stage: each is the recorded candidate with one more edit."""

    def __init__(self, context: "Context", dtype: torch.dtype) -> None:
        assert context.objective is not None
        assert context.trainer is not None
        self._context, self._dtype, self.trainer = context, dtype, context.trainer
        self._recorded = Candidate(context.objective, context.trainer, config=context.config)
        self.found: list[Established] = []
        self._trials: Sequence[Trial] = ()
        self._off = frozenset[str]()
        self._always_off = frozenset[str]()

    def step(self, batch: RolloutBatch, log: LoggedMetrics, offset: int = 0, window: Window | None = None) -> Step:
        """Return a step with what the log has under its number, or under another."""
        logged = log.at(StepKey(batch.step + offset, batch.split))
        return Step(batch, logged, self._dtype, self.trainer, self._context.digits, window=window)

    def audit(
        self, trial: Trial, *more: Hypothesis, until: str = STAGES[-1], only: Collection[str] | None = None
    ) -> AuditTally:
        """Audit steps under the established edits and more, up to a stage, or `only` some quantities.

        Empty where a step cannot be evaluated.
        """
        edits = (*self.edits, *more)

        def make() -> AuditTally:
            total: AuditTally = {}
            means: OpenWindows = {}
            for step in trial:
                evaluation = self._evaluated(step, edits, rows_only=until == STAGES[0])
                if evaluation is None:
                    return {}
                metrics = step.metrics_of(evaluation, self.trainer)
                tallies, means = self.audited(step, edits, evaluation, metrics, means, until, only)
                total = add_tallies(total, tallies)
            return total

        names = tuple(edit.name for edit in edits)
        return trial[0].once(("audit", names, until, None if only is None else frozenset(only)), make)

    def _audits(self, stage: str, *more: Hypothesis, only: Collection[str] | None = None) -> list[AuditTally]:
        return [self.audit(trial, *more, until=stage, only=only) for trial in self._trials]

    def edited(self, edits: Sequence[Hypothesis]) -> Candidate:
        """Return the recorded candidate with some edits."""
        return replace(self._recorded, edits=tuple(edits))

    def _evaluated(self, step: Step, edits: Sequence[Hypothesis], *, rows_only: bool) -> Evaluation | None:
        candidate = self.edited(edits)
        key = ("evaluated", tuple(edit.name for edit in candidate.evaluating), rows_only)
        return step.once(key, lambda: step.evaluated(candidate, rows_only=rows_only))

    def audited(
        self,
        step: Step,
        edits: Sequence[Hypothesis],
        evaluation: Evaluation,
        recomputed: Mapping[str, float],
        means: OpenWindows,
        until: str = STAGES[-1],
        only: Collection[str] | None = None,
    ) -> tuple[AuditTally, OpenWindows]:
        """The audit of a step, with the means that end there, given those that began before; and those that go on."""
        # Some metrics take longer than the loss: only those are made that are compared.
        trainer, config, stages = self.trainer, self._context.config, STAGES[: STAGES.index(until) + 1]
        # A line that may be of other rows explains nothing.
        unjoined = step.once("unjoined", lambda: Unjoined(step.batch, trainer, config).among(step.metrics))
        means_of = {} if step.window is None else step.window.values
        wanted = [*(name for name in step.metrics if name not in unjoined), *means_of]
        names = [name for name in wanted if stage_of(trainer, name) in stages and name in recomputed]
        if only is not None:
            names = [name for name in names if quantity_of(step.batch, name) in only]
        candidate = self.edited(edits)
        metrics = candidate.edited(evaluation, trainer, {name: recomputed[name] for name in names})
        at_step = {name: value for name, value in metrics.items() if name in step.metrics and name not in unjoined}
        tallies = step.compared(candidate, evaluation, at_step, stages if only is None else (until,), in_doubt=True)
        if step.window is None:
            return tallies, means
        logged = step.logged(evaluation.objective)
        values = window_values(logged, evaluation, trainer, config, metrics, in_doubt=True)
        closed, means = join(means, opened(step.window, step.batch.step, values, step.digits))
        return add_tallies(tallies, closed), means

    def _solved(self, stage: str) -> list[Hypothesis]:
        """Return the hypotheses that the families of a stage suggest."""
        recorded = self._recorded.objective
        families = [family for family in FAMILIES if family.stage == stage and family.applies(recorded)]
        seen = [
            [
                Seen(
                    evaluation,
                    step.advantage_N(recorded),
                    step.metrics if step.window is None else {**step.metrics, **step.window.values},
                    self.trainer,
                )
                for step in trial
                if (evaluation := self._evaluated(step, self.edits, rows_only=stage == STAGES[0])) is not None
            ]
            for trial in (self._trials if families else ())
        ]
        solutions = [solution for family in families for solution in family.solve([each for each in seen if each])]
        return [solution for solution in solutions if solution not in self.edits]

    def try_on(self, trials: Sequence[Trial], off: Collection[str], always_off: Collection[str] = ()) -> None:
        """Establish what explains the disagreements of some steps, stage by stage.

        Args:
            trials: the steps.
            off: quantities to explain. Of others a value may be in doubt at a step, and follow at the rest.
            always_off: those of which no value of the run agrees: there a 0 is told from what the options give.
        """
        self._trials, self._off, self._always_off = trials, frozenset(off), frozenset(always_off)
        self._try_stages(STAGES)
        if not self.found and any(name.startswith(STAGES[0]) for name in self._left(STAGES[0])):
            # A loss that the logged advantages reproduce is no second fault.
            self._establish(Established(AS_LOGGED, STAGES[0], frozenset()))
            self._try_stages(STAGES[1:])

    def _establish(self, established: Established) -> None:
        """Try everything under one more edit from now on; what was kept without it is of no use."""
        self.found.append(established)
        for step in (step for trial in self._trials for step in trial):
            step.forget()

    def _try_stages(self, stages: Sequence[str]) -> None:
        candidates, unexplained = applicable(self._context), set[str]()
        for stage in stages:
            # An edit that leaves a stage unexplained which it changes explains a later one by chance.
            reaching = [
                edit
                for edit in candidates
                if STAGES.index(edit.stage) <= STAGES.index(stage)
                and not any(self._leaves(each, edit) for each in _changed_by(edit, unexplained))
            ]
            for _ in range(ROUNDS):
                best = self._best(stage, reaching)
                if best is None:
                    break
                self._establish(best)
            if self._left(stage):
                unexplained.add(stage)

    def _left(self, stage: str) -> set[str]:
        """The quantities of a stage that disagree under the edits that are established."""
        counts = _disagreeing(self._audits(stage), stage)
        return {name for name, count in counts.items() if count and name in self._off}

    def _leaves(self, stage: str, edit: Hypothesis) -> bool:
        """True if a quantity of a stage disagrees at a step under one more edit; the steps after it are not audited."""
        audits = (self.audit(trial, edit, until=stage, only=self._off) for trial in self._trials)
        return any(
            tally.disagree and tally.stage == stage and name in self._off
            for audit in audits
            for name, tally in audit.items()
        )

    @property
    def bounded(self) -> tuple[BoundedHypothesis, ...]:
        """The hypotheses with a part that the rows do not hold, which could apply."""
        return tuple(edit for edit in BOUNDED if edit.applies(self._recorded.objective))

    @property
    def edits(self) -> list[Hypothesis]:
        """The hypotheses that are established."""
        return [established.hypothesis for established in self.found]

    def _best(self, stage: str, candidates: Sequence[Hypothesis]) -> Established | None:
        """The hypothesis that explains most quantities of a stage, and the others that explain the same."""
        off, first = self._left(stage), STAGES[0]
        if not off:
            return None
        candidates = [edit for edit in candidates if edit not in self.edits]
        if stage != first:
            # Whether advantages that agree still do takes no tokens.
            candidates = [
                edit for edit in candidates if edit.stage != first or not self._breaks(self._trials[0], edit, first)
            ]
        explained = self._explaining(off, candidates, stage)
        if not explained:
            solved = self._solved(stage)
            explained = self._explaining(off, solved, stage)
            if not explained:
                return self._best_of_parts(stage, [*candidates, *solved])
        most = max(len(quantities) for quantities in explained.values())
        rivals = [edit for edit, quantities in explained.items() if len(quantities) == most]
        if len(rivals) > 1:
            # Of those that explain as much here the one that explains more of what follows.
            after = {edit: self.audit(self._trials[0], edit).values() for edit in rivals}
            agreeing = {edit: sum(not tally.disagree for tally in tallies) for edit, tallies in after.items()}
            rivals = [edit for edit in rivals if agreeing[edit] == max(agreeing.values())]
        best = rivals[0]
        also = tuple(edit.name for edit in rivals if explained[edit] == explained[best] and edit != best)
        return Established(best, stage, explained[best], also)

    def _explaining(
        self, off: set[str], candidates: Sequence[Hypothesis], stage: str
    ) -> dict[Hypothesis, frozenset[str]]:
        """The candidates that break nothing, to the quantities that they explain."""
        explained = {}
        of_rows = {name for name in off if name.startswith("advantages")}
        for edit in candidates:
            quantities = self._explained(off, edit, stage)
            if of_rows and not of_rows & quantities:
                continue  # the extremes and the mean of a step are the same for many advantages
            if quantities and not any(self._breaks(trial, edit) for trial in self._trials):
                explained[edit] = quantities
        return explained

    def _best_of_parts(self, stage: str, candidates: Sequence[Hypothesis]) -> Established | None:
        """The hypothesis that leaves the fewest values of a quantity unexplained, if it explains most of them."""
        before = self._audits(stage)
        counts = _disagreeing(before, stage).items()
        off = {name: count for name, count in counts if count >= PARTLY_VALUES and name in self._off}
        left: dict[Hypothesis, tuple[float, frozenset[str]]] = {}
        for edit in candidates if off else ():
            if edit.advantages is not None:
                continue
            after = self._audits(stage, edit, only=off)
            if any(base.keys() & off.keys() - tallies.keys() for base, tallies in zip(before, after, strict=True)):
                continue
            still = _disagreeing(after, stage)
            shares = {name: still.get(name, 0) / count for name, count in off.items()}
            explained = frozenset(name for name, share in shares.items() if share <= 1 - PARTLY)
            if explained and max(shares.values()) <= 1 and not any(self._breaks(trial, edit) for trial in self._trials):
                left[edit] = sum(shares.values()), explained
        if not left:
            return None
        best = min(left, key=lambda edit: left[edit][0])
        also = tuple(edit.name for edit in left if left[edit] == left[best] and edit != best)
        return Established(best, stage, left[best][1], also, partly=True)

    def _breaks(self, trial: Trial, edit: Hypothesis, until: str = STAGES[-1]) -> bool:
        """True if a quantity that agrees at a step, of any stage up to one, does not under one more edit."""
        agreeing = {name for name, tally in self.audit(trial, until=until).items() if not tally.disagree}
        after = self.audit(trial, edit, until=until) if agreeing else {}
        return any(after[name].disagree and self._claims(edit, name) for name in agreeing & after.keys())

    def _claims(self, edit: Hypothesis, quantity: str) -> bool:
        """False for what an edit redefines without claiming that the trainer did: that it agrees says nothing."""
        return self.trainer.log.kind_of(quantity.removesuffix(" (eval)")) not in edit.unclaimed

    def _explained(self, off: set[str], edit: Hypothesis, stage: str) -> frozenset[str]:
        """The quantities that agree in every step under one more edit, where they did not, if that says enough."""
        left = set(off)
        bits: dict[str, dict[float, float]] = {name: {} for name in off}
        zeros = dict.fromkeys(off, 0.0)
        for trial in self._trials:
            base = self.audit(trial, until=stage)
            disagreeing = {name for name in off if name in base and base[name].disagree}
            if not disagreeing:
                continue
            tallies = self.audit(trial, edit, until=stage, only=off)
            left -= disagreeing - {name for name, tally in tallies.items() if tally.compared and not tally.disagree}
            if not left:
                break
            for name in left & disagreeing:
                first = base[name].first
                assert first is not None  # a value disagrees
                bits[name][first[2]] = _bits(base[name], tallies[name])
                if name in self._always_off:
                    zeros[name] += min(base[name].zero_bits, MOST_ZERO_BITS)
        return frozenset(name for name in left if sum(bits[name].values()) + zeros[name] >= ENOUGH_BITS)


def _changed_by(edit: Hypothesis, stages: Collection[str]) -> list[str]:
    """Those of some stages that an edit changes: its own, and where the rows are evaluated anew all after it."""
    first = STAGES.index(edit.stage)
    return [each for each in stages if each == edit.stage or (edit.evaluates and STAGES.index(each) > first)]


def _bits(before: QuantityTally, after: QuantityTally) -> float:
    """Return the evidence, in bits, of a quantity's values for an edit with which they agree."""
    if not (before.telling and 0 < after.radius < inf and 0 < before.radius < inf):
        return 0.0
    wider = log2(after.radius / before.radius)
    return min(max(before.bits / before.telling - wider, 0.0), MOST_BITS) * before.telling


def _disagreeing(audits: Iterable[AuditTally], stage: str) -> dict[str, int]:
    """Count the values of each quantity of a stage that disagree, over some steps."""
    total: dict[str, int] = {}
    for audit in audits:
        for name, tally in audit.items():
            if tally.stage == stage:
                total[name] = total.get(name, 0) + tally.disagree
    return total

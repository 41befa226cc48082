"""Tell whether a run that its recorded options reproduce has a fault that the recorded release has."""

from collections import Counter
from dataclasses import replace

from rolloutdoctor.audit.discrimination import Compared, told_apart
from rolloutdoctor.audit.step import compare_step
from rolloutdoctor.results.identification import ReleaseFault
from rolloutdoctor.search.candidates import Candidate
from rolloutdoctor.search.known_faults import code_of, known_faults
from rolloutdoctor.search.step import Step


class FaultCounts:
    """Counts of the logged values that tell the recorded objective from the ones with known fixes."""

    def __init__(self, recorded: Candidate | None, columns: frozenset[str]) -> None:
        self._recorded = recorded
        self._fixes = () if recorded is None else known_faults(recorded.objective, columns)
        self._told: Counter[tuple[str, str]] = Counter()
        self._as_is: Counter[tuple[str, str]] = Counter()

    def add(self, step: Step) -> None:
        """Count the values of a step."""
        if not self._fixes or self._recorded is None:
            return
        values = self._compared(step, self._recorded)
        for fix in self._fixes if values else ():
            fixed = self._compared(step, replace(self._recorded, objective=fix.apply(self._recorded.objective)))
            for name in values.keys() & fixed.keys():
                apart, as_is, _ = told_apart(values[name], fixed[name])
                self._told[fix.label, name] += apart
                self._as_is[fix.label, name] += as_is

    def _compared(self, step: Step, candidate: Candidate) -> dict[str, Compared]:
        evaluation, trainer = step.evaluated(candidate), candidate.trainer or step.names
        if evaluation is None:
            return {}
        recomputed = trainer.metrics(evaluation) if evaluation.tokens is not None else {}
        metrics = {name: recomputed[name] for name in step.metrics if name in recomputed}
        return compare_step(step.logged(evaluation.objective), evaluation, trainer, candidate.config, metrics)

    def found(self) -> tuple[ReleaseFault, ...]:
        """Return the faults that every value has that tells them from their fixes."""
        faults = []
        for fix in self._fixes:
            names = [name for label, name in self._told if label == fix.label and self._told[label, name]]
            shown = sorted(name for name in names if self._as_is[fix.label, name] == self._told[fix.label, name])
            if shown:
                faults.append(ReleaseFault(code_of(fix.label), fix.fix.name, tuple(shown)))
        return tuple(faults)

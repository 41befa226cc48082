"""Find what a trainer computed instead, where the rows and the recorded options do not reproduce its log.

A hypothesis is an audit under an edit. The stages of the audit are gone through in the order in which a trainer
computes: what is established at one stage holds for those after it, so that wrong advantages are not taken for a wrong
loss. Hypotheses are tried on some of the steps that disagree, and what explains those is counted over all steps.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.audit.tally import AuditTally
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.data.windows import window_of
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.search.cause_counts import confirm
from rolloutdoctor.search.cause_search import Search, Trial, applicable
from rolloutdoctor.search.diagnosis import Diagnosis
from rolloutdoctor.search.hypotheses.table import FAMILIES
from rolloutdoctor.search.log_numbering import diagnosed, find_offset
from rolloutdoctor.search.step import Step

if TYPE_CHECKING:
    from rolloutdoctor.rules.base import Context

TRIAL_TOKENS = 300_000
"""Tokens of the steps on which every hypothesis is tried."""

TRIAL_STEPS = 16

OPEN_WINDOWS = 2
"""Windows of which some steps are kept until the others come."""

Batches = Callable[[], Iterable[RolloutBatch]]
"""Reads the steps of a run from the start; called twice at most."""


def columns_for_causes(context: "Context") -> frozenset[str]:
    """Columns that the hypotheses read beyond those of a check."""
    hypotheses = applicable(context)
    families = [family for family in FAMILIES if context.objective is not None and family.applies(context.objective)]
    names = frozenset().union(
        *(hypothesis.columns for hypothesis in hypotheses), *(family.columns for family in families)
    )
    return names & context.columns


def find_causes(
    batches: Batches, metrics: LoggedMetrics, context: "Context", audit: AuditTally, dtype: torch.dtype
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

    of_rows = any(audit[name].stage == STAGES[-1] for name in off)
    plain = Search(context, dtype)
    offset = find_offset(batches(), metrics, plain) if of_rows and not context.windows else 0

    def steps() -> Iterator[Step]:
        for batch in batches():
            window = window_of(context.windows, batch.step) if batch.split == TRAIN else None
            yield plain.step(batch, metrics, offset, window)

    def explained(audit: AuditTally) -> Diagnosis:
        left = {name for name in off if name in audit}
        if not left:
            return Diagnosis()
        search = Search(context, dtype)
        always_off = {name for name in left if not audit[name].agree}
        of_means = any(audit[name].window > 1 for name in left)
        trials = _chosen(_windows(steps()) if of_means else ((step,) for step in steps()), search, left)
        search.try_on(trials, left, always_off)
        return confirm(search, steps(), audit)

    return diagnosed(offset, steps, audit, plain, explained) if offset else explained(audit)


def _windows(steps: Iterable[Step]) -> Iterator[Trial]:
    """Gather the steps of each window; steps in no window, and windows that are not whole, are left out."""
    begun: dict[int, list[Step]] = {}
    for step in steps:
        window = step.window
        if window is None:
            continue
        begun.setdefault(window.last, []).append(step)
        if len(begun[window.last]) == window.size:
            yield tuple(begun.pop(window.last))
        elif len(begun) > OPEN_WINDOWS:
            del begun[min(begun)]


def _chosen(trials: Iterable[Trial], search: Search, off: set[str]) -> list[Trial]:
    """The first steps, or windows, that disagree, up to a number of tokens; one at least."""
    chosen: list[Trial] = []
    tokens = 0
    for trial in trials:
        tallies = search.audit(trial)
        if not any(tallies[name].disagree for name in off & tallies.keys()):
            continue
        size = sum(step.batch.tokens for step in trial)
        if chosen and (tokens + size > TRIAL_TOKENS or len(chosen) >= TRIAL_STEPS):
            break
        chosen.append(trial)
        tokens += size
    return chosen

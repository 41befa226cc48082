"""Whether a log and the rows number the steps alike: one may count from 0, and the other from 1."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice

from rolloutdoctor.audit.tally import AuditTally, add_tallies
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.audit import OTHER_NUMBERS, Cause
from rolloutdoctor.search.cause_search import Search
from rolloutdoctor.search.diagnosis import Diagnosis
from rolloutdoctor.search.step import Step

_STEPS = 6
"""Steps on which offsets are tried."""

_NEAR = (1, -1, 2, -2)

_LEAST = 8
"""Values that have to agree under an offset: of fewer it may be chance."""

CODE = "RDM004"


def find_offset(batches: Iterable[RolloutBatch], metrics: LoggedMetrics, search: Search) -> int:
    """Return by how much the log's numbers of steps are larger than those of the rows; 0 if nothing shows it.

    That is decided by metrics of the rows themselves, such as rewards and lengths, which no option changes: under the
    offset all of them have to agree, where some do not as the steps are numbered.
    """
    tried = list(islice((batch for batch in batches if batch.split == TRAIN and len(batch)), _STEPS))
    logged = [key.step for key in metrics.steps() if key.split == TRAIN]
    if not tried or not logged or not _differs(tried, metrics, search, 0):
        return 0
    for offset in dict.fromkeys((*_NEAR, logged[0] - tried[0].step)):
        if offset and _differs(tried, metrics, search, offset) is False:
            return offset
    return 0


def _differs(tried: Sequence[RolloutBatch], metrics: LoggedMetrics, search: Search, offset: int) -> bool | None:
    """Whether a metric of the rows is not reproduced under an offset; None where too few could be compared."""
    total: AuditTally = {}
    for batch in tried:
        total = add_tallies(total, search.audit((search.step(batch, metrics, offset),)))
    of_rows = [tally for tally in total.values() if tally.stage == STAGES[-1]]
    if any(tally.disagree for tally in of_rows):
        return True
    return False if sum(tally.compared for tally in of_rows) >= _LEAST else None


def diagnosed(
    offset: int,
    steps: Callable[[], Iterable[Step]],
    audit: AuditTally,
    search: Search,
    rest: Callable[[AuditTally], Diagnosis],
) -> Diagnosis:
    """Name the offset as the cause of what agrees under it, and explain the rest.

    Args:
        offset: of the log.
        steps: reads the steps, with what the log has under its own numbers.
        audit: of the run as it is numbered.
        search: audits steps.
        rest: explains the disagreements that are left.
    """
    tallies: AuditTally = {}
    for step in steps():
        tallies = add_tallies(tallies, search.audit((step,)))
    explains = sorted(
        name for name, tally in audit.items() if tally.disagree and name in tallies and not tallies[name].disagree
    )
    shown = [name for name in explains if audit[name].stage == STAGES[-1]] or explains
    if not shown:
        return rest(audit)
    name = max(shown, key=lambda each: (audit[each].disagree, each))
    by = f"{abs(offset)} {'step' if abs(offset) == 1 else 'steps'}"
    cause = Cause(
        hypothesis=OTHER_NUMBERS,
        code=CODE,
        words=f"the log numbers its steps {by} {'later' if offset > 0 else 'earlier'} than the rows",
        remedy=f"number both alike: {'subtract' if offset > 0 else 'add'} {abs(offset)} "
        f"{'from' if offset > 0 else 'to'} the steps of the log, or change those of the rows",
        quantity=name,
        compared=tallies[name].compared,
        as_recorded=audit[name].agree,
        as_found=tallies[name].agree,
        worst=tallies[name].worst,
        explains=tuple(explains),
    )
    left = rest({each: tally for each, tally in tallies.items() if tally.disagree})
    return replace(left, causes=(cause, *left.causes))

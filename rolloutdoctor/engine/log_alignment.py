"""Whether the lines of a log are those of the rows: a line for each optimizer step, or for each step with rows."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from rolloutdoctor.audit.tally import OF_JOIN, AuditTally, QuantityTally
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_state import RunState


def joined(prepared: PreparedRun, state: RunState) -> RunState:
    """Return the state of a run with no disagreement of metrics whose lines may be those of other rows.

    Where the rows of a step serve K optimizer steps, the next rows stand K steps later, and the log has lines between
    them, a line is an optimizer step. A trainer that says so has its lines joined before; of others nothing is known.
    """
    configured = prepared.configured
    is_known = configured is not None and configured.trainer.updates.per_generation(configured.config) is not None
    steps = sorted(key.step for key in state.seen if key.split == TRAIN)
    between = len(
        [step for step in prepared.run.metrics.lines.difference(steps) if steps and steps[0] < step < steps[-1]]
    )
    gaps = Counter(later - earlier for earlier, later in pairwise(steps))
    if is_known or state.updates == 1 or not between or gaps.most_common(1)[0][0] != state.updates:
        return state
    reason = (
        f"the log has lines at {between} steps without rows, and the rows of a step serve {state.updates} optimizer "
        f"steps: {OF_JOIN}"
    )
    return replace(state, audit=_in_doubt(state.audit, reason))


def _in_doubt(audit: AuditTally, reason: str) -> Mapping[str, QuantityTally]:
    of_rows = ("advantages", "kl")
    return {
        name: tally
        if name in of_rows or not tally.disagree
        else QuantityTally(
            tally.stage, tally.agree, tally.agree, not_compared=tally.not_compared + tally.disagree, reason=reason
        )
        for name, tally in audit.items()
    }

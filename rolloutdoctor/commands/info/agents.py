"""What a run of an agent says of its trajectories, and what would record the rest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.rules.base import Context
from rolloutdoctor.trainers.spec import Trainer

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

AGENT_COLUMNS = ("trajectory_id", "task_id", "turns", "status", "error")
"""Columns that say what a trajectory is a part of, who wrote it, and how it ended."""

_SHOW = ("trajectory_id", "turns", "error")
"""Those of them that only runs of agents have."""

_LOGGED = ("turns", "turns_max", "tool_calls")
"""Quantities that only runs of agents log."""

MASKS = frozenset({"response_mask", "response_mask_pre"})
"""Columns that turns are derived from."""


def shows_agent(columns: frozenset[str], context: Context) -> bool:
    """Tell a run of an agent by its columns or its log."""
    return any(name in columns for name in _SHOW) or any(name in context.quantities for name in _LOGGED)


def has_gaps(batch: "RolloutBatch") -> bool:
    """Tell whether a mask has a masked run between two trained ones, as where a tool answers the policy."""
    from rolloutdoctor.data.derived_turns import turns_of_step

    return turns_of_step(batch) is not None


def absent_of_agent(columns: frozenset[str], context: Context, trainer: Trainer | None) -> Mapping[str, str]:
    """Return the columns of `AGENT_COLUMNS` that are not there, with what would record each.

    Args:
        columns: those that are there.
        context: the run.
        trainer: who made it, also where its options are not known.
    """
    agents = {} if trainer is None else trainer.agents
    return {name: agents.get(name) or remedy([name], context) for name in AGENT_COLUMNS if name not in columns}

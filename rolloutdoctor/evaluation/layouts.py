"""Layout of a step, computed once for all objectives that it is evaluated under."""

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.objective.required_columns import LAYOUT_COLUMNS


def layout_of(batch: RolloutBatch, *, separate: bool) -> Layout:
    """Return the layout of a step: optimizer steps and micro-batches, from the columns that are there.

    Args:
        batch: the step.
        separate: every micro-batch is a loss of its own, and they are averaged (evaluation).
    """
    return _separate(batch) if separate else _as_trained(batch)


@remembered
def uncut_layout(batch: RolloutBatch) -> Layout:
    """The same of the step as one micro-batch and one optimizer step, of which only the trajectories are known."""
    return Layout.of(batch.rows, trajectory_N=batch.per_row.get("trajectory_id"))


@remembered
def _separate(batch: RolloutBatch) -> Layout:
    return _made(batch, separate=True)


@remembered
def _as_trained(batch: RolloutBatch) -> Layout:
    return _made(batch, separate=False)


def _made(batch: RolloutBatch, *, separate: bool) -> Layout:
    columns = [batch.per_row.get(name) for name in LAYOUT_COLUMNS]
    prompts = None if batch.groups is None else len(batch.groups)
    group_N = None if batch.groups is None else batch.groups.index_N
    return Layout.of(batch.rows, *columns, separate=separate, prompts=prompts, place_N=batch.place_N, group_N=group_N)

"""How a step was cut up, worked out once for all objectives that it is evaluated under, and forgotten with it."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.objective.required_columns import LAYOUT_COLUMNS

_known: WeakKeyDictionary[RolloutBatch, dict[str, Layout]] = WeakKeyDictionary()


def layout_of(batch: RolloutBatch, *, separate: bool) -> Layout:
    """How a step was cut into optimiser steps and micro-batches, from the columns that are there.

    Args:
        batch: the step.
        separate: every micro-batch is a loss of its own, and they are averaged (evaluation).
    """
    columns = [batch.per_row.get(name) for name in LAYOUT_COLUMNS]
    prompts = None if batch.groups is None else len(batch.groups)

    def made() -> Layout:
        return Layout.of(batch.rows, *columns, separate=separate, prompts=prompts, place_N=batch.place_N)

    return _remembered(batch, f"separate {separate}", made)


def uncut_layout(batch: RolloutBatch) -> Layout:
    """The same of the step as one micro-batch and one optimiser step, of which only the trajectories are told."""
    trajectory_N = batch.per_row.get("trajectory_id")
    return _remembered(batch, "uncut", lambda: Layout.of(batch.rows, trajectory_N=trajectory_N))


def _remembered(batch: RolloutBatch, name: str, made: Callable[[], Layout]) -> Layout:
    found = _known.setdefault(batch, {})
    if name not in found:
        found[name] = made()
    return found[name]

"""The trajectories of a group, turn by turn: who wrote what, what was trained, and what it weighs in the gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.measured_frames import turns_of
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.evaluation.run_tables import EMPTY_TURNS
from rolloutdoctor.results.inspection import Trajectory, Turn
from rolloutdoctor.rules.step import StepView

COLUMNS = frozenset({"turns", "trajectory_id", "error", "status", "response_mask", "response_mask_pre"})
"""Columns that turns are read from."""

MOST_TURNS = 500
"""Turns of a trajectory that are shown, from its start."""


def trajectories_of(batch: RolloutBatch, rows: Sequence[int], evaluation: Evaluation | None) -> tuple[Trajectory, ...]:
    """Return the trajectories that some rows are of, with all their rows of the step; none without a turn.

    Args:
        batch: the step.
        rows: some of its rows; without `trajectory_id` each is a trajectory.
        evaluation: as configured, token by token, or None.
    """
    evaluations = {} if evaluation is None else {AS_CONFIGURED: evaluation}
    turns = turns_of(StepView(batch, {}, evaluations=evaluations), {})
    if turns.is_empty():
        return ()
    total = None if evaluation is None or evaluation.tokens is None else float(evaluation.tokens.grad_l1_N.sum())
    by_row = {int(row): row_turns for (row,), row_turns in turns.group_by("row", maintain_order=True)}
    trajectories = [_trajectory(batch, name, members, by_row, total) for name, members in _rows_of(batch, rows)]
    return tuple(trajectory for trajectory in trajectories if trajectory.turns)


def _rows_of(batch: RolloutBatch, rows: Sequence[int]) -> list[tuple[str | None, list[int]]]:
    """Return the trajectories of rows, each with its own rows, in the order of the file."""
    if "trajectory_id" not in batch.per_row:
        return [(None, [row]) for row in rows]
    id_N = batch.per_row["trajectory_id"].cpu()
    by_trajectory: dict[int, list[int]] = {}
    alone: list[tuple[str | None, list[int]]] = []
    for row in rows:
        trajectory = int(id_N[row])
        if trajectory < 0:
            alone.append((None, [row]))
        elif trajectory not in by_trajectory:
            by_trajectory[trajectory] = torch.nonzero(id_N == trajectory).flatten().tolist()
    return [*((str(name), members) for name, members in by_trajectory.items()), *alone]


def _trajectory(
    batch: RolloutBatch, name: str | None, rows: list[int], by_row: Mapping[int, pl.DataFrame], total: float | None
) -> Trajectory:
    turns = pl.concat([EMPTY_TURNS, *(by_row[row] for row in rows if row in by_row)])
    rewards = batch.column("reward")[rows].double() if batch.has("reward") else torch.zeros(0)
    texts = {name: [column[row] for row in rows] if column else [] for name, column in _texts(batch).items()}
    gradient = None if turns["grad_l1"].null_count() else float(turns["grad_l1"].sum())
    return Trajectory(
        trajectory_id=name,
        rows=tuple(batch.sample_name(row) for row in rows),
        rewards=tuple(sorted(set(rewards[rewards.isfinite()].tolist()))),
        statuses=tuple(dict.fromkeys(filter(None, texts["status"]))),
        errors=tuple(dict.fromkeys(filter(None, texts["error"]))),
        gradient=gradient,
        share=_share(gradient, total),
        count=len(turns),
        turns=tuple(_turn(batch, line, total) for line in turns.head(MOST_TURNS).iter_rows(named=True)),
    )


def _texts(batch: RolloutBatch) -> Mapping[str, Sequence[str | None]]:
    return {"status": batch.statuses, "error": batch.errors}


def _turn(batch: RolloutBatch, line: Mapping[str, Any], total: float | None) -> Turn:
    names = ("turn", "author", "start", "stop", "version", "status", "error", "derived")
    return Turn(
        row=batch.sample_name(line["row"]),
        trained=line["trained_tokens"],
        gradient=line["grad_l1"],
        share=_share(line["grad_l1"], total),
        **{name: line[name] for name in names},
    )


def _share(part: float | None, total: float | None) -> float | None:
    if part is None or total is None:
        return None
    return part / total if total else 0.0

"""The groups that move most between two evaluations, with their rows and, if asked for, their texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch, StepKey
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.comparison import MovedGroup, MovedRow, Pair

MOST_ROWS = 8
"""Rows kept of a group that moved."""


@dataclass(frozen=True)
class Candidate:
    """A group that may be among those that moved most.

    Attributes:
        key: step and split.
        group: what is known of it, without texts.
        numbers: its rows' numbers in the batch.
    """

    key: StepKey
    group: MovedGroup
    numbers: tuple[int, ...]


def most_moved(
    best: Sequence[Candidate], batch: RolloutBatch, changes: Mapping[str, Tensor], keep: int
) -> list[Candidate]:
    """The `keep` groups that moved most among `best` and a step, most first, the earlier of equals first.

    Args:
        best: those of the steps before.
        batch: the step.
        changes: what `row_changes` found in it.
        keep: how many.
    """
    moved_N = changes.get("versus_l1", changes.get("shift"))
    if batch.groups is None or moved_N is None:
        return list(best)
    moved_G = batch.groups.total(moved_N).nan_to_num(0.0, 0.0, 0.0).cpu()
    values, chosen = torch.sort(moved_G, descending=True, stable=True)
    found = [
        _candidate(batch, changes, moved_N, group, moved)
        for moved, group in zip(values[:keep].tolist(), chosen[:keep].tolist(), strict=True)
        if moved > 0
    ]
    return ranked([*best, *found], keep)


def ranked(candidates: Sequence[Candidate], keep: int) -> list[Candidate]:
    """The `keep` that moved most, most first, the earlier of equals first."""
    return sorted(candidates, key=lambda one: (-one.group.moved, one.key, one.group.group_id or ""))[:keep]


def _candidate(
    batch: RolloutBatch, changes: Mapping[str, Tensor], moved_N: Tensor, group: int, moved: float
) -> Candidate:
    assert batch.groups is not None
    members = batch.groups.order_N[batch.groups.offsets[group] : batch.groups.offsets[group + 1]]
    order = torch.argsort(moved_N[members], descending=True, stable=True)[:MOST_ROWS]
    numbers = tuple(members[order].tolist())
    rows = tuple(
        MovedRow(
            sample_id=batch.sample_name(row),
            reward=float(batch.column("reward")[row]) if batch.has("reward") else None,
            advantage=Pair(float(changes["advantage"][row]), float(changes["advantage_after"][row])),
        )
        for row in numbers
    )
    name = batch.group_name(group)
    return Candidate(batch.key, MovedGroup(batch.step, batch.split, name, moved, len(members), rows), numbers)


def moved_groups(run: Run, candidates: Sequence[Candidate], *, text: bool) -> tuple[MovedGroup, ...]:
    """The groups, with the texts of their rows where these are asked for and there."""
    if not text:
        return tuple(candidate.group for candidate in candidates)
    wanted: dict[StepKey, set[int]] = {}
    for candidate in candidates:
        wanted.setdefault(candidate.key, set()).update(candidate.numbers)
    texts = run.texts(wanted)
    return tuple(_with_texts(candidate, texts) for candidate in candidates)


def _with_texts(candidate: Candidate, texts: Mapping[tuple[StepKey, int], Mapping[str, object]]) -> MovedGroup:
    group = candidate.group
    rows = []
    for row, number in zip(group.rows, candidate.numbers, strict=True):
        cells = texts.get((candidate.key, number), {})
        prompt, response = _words(cells.get("prompt")), _words(cells.get("response"))
        rows.append(MovedRow(row.sample_id, row.reward, row.advantage, prompt, response))
    return MovedGroup(group.step, group.split, group.group_id, group.moved, group.size, tuple(rows))


def _words(cell: object) -> str | None:
    """A text, or the contents of messages one after another."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, list):
        contents = [part.get("content") if isinstance(part, dict) else part for part in cell]
        return "\n".join(str(content) for content in contents if content is not None)
    return str(cell)

"""Hypotheses about which rows a trainer compared with each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, RowsEdit, has_groups

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

CODE = "RDI003"
REMEDY = (
    "compare the responses to one prompt: pass the group id to the advantage computation, and never reshape rewards by "
    "position after rows were reordered or filtered"
)
REFERENCES = (
    "https://github.com/PrimeIntellect-ai/prime-rl/issues/600",
    "https://github.com/THUDM/slime/issues/2230",
)


def regrouped(batch: "RolloutBatch", index_N: Tensor) -> "RolloutBatch | None":
    """Return the rows with other groups, or None if the groups are the same."""
    assert batch.groups is not None
    groups = Groups.of(torch.unique(index_N, return_inverse=True)[1])
    if _is_same(groups.index_N, batch.groups.index_N):
        return None
    names = [f"rows like {int(row)}" for row in groups.order_N[groups.offsets[:-1]]]
    return replace(batch, groups=groups, group_ids=names)


def _is_same(one_N: Tensor, other_N: Tensor) -> bool:
    """True if two numberings put the same rows together."""
    pairs = int(torch.unique(torch.stack([one_N, other_N]), dim=1).shape[1])
    return pairs == len(torch.unique(one_N)) == len(torch.unique(other_N))


def usual_size(batch: "RolloutBatch") -> int:
    """The size that most groups have."""
    assert batch.groups is not None
    return int(torch.mode(batch.groups.size_G).values)


def places(batch: "RolloutBatch") -> Tensor:
    """Return the number of each row, ``[N]``."""
    return torch.arange(len(batch), device=batch.device)


def _regrouped(index: Callable[["RolloutBatch", Groups], Tensor | None]) -> RowsEdit:
    """Return the edit to the groups that give each row its number, if they do."""

    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        index_N = None if batch.groups is None or not len(batch) else index(batch, batch.groups)
        return None if index_N is None else regrouped(batch, index_N)

    return edit


def _numbered(batch: "RolloutBatch", column: str) -> Tensor | None:
    """Number of the value of a row column, ``[N]``."""
    value_N = batch.per_row.get(column)
    return None if value_N is None else torch.unique(value_N, return_inverse=True)[1]


def _within(column: str) -> RowsEdit:
    """Groups cut at the values of a row column."""

    def index(batch: "RolloutBatch", groups: Groups) -> Tensor | None:
        other_N = _numbered(batch, column)
        return None if other_N is None else groups.index_N * (other_N.max() + 1) + other_N

    return _regrouped(index)


def _by(column: str) -> RowsEdit:
    """Groups of equal values of a row column."""
    return _regrouped(lambda batch, groups: _numbered(batch, column))


_blocks = _regrouped(lambda batch, groups: places(batch) // usual_size(batch))
_tiled = _regrouped(lambda batch, groups: places(batch) % max(len(batch) // usual_size(batch), 1))
_whole = _regrouped(lambda batch, groups: torch.zeros_like(groups.index_N))
_single = _regrouped(lambda batch, groups: places(batch))


def _hypothesis(name: str, words: str, rows: RowsEdit, *columns: str) -> Hypothesis:
    return Hypothesis(
        name=name,
        code=CODE,
        stage="advantages",
        words=words,
        remedy=REMEDY,
        applies=has_groups,
        rows=rows,
        columns=frozenset(columns),
        references=REFERENCES,
    )


PARTITIONS = (
    _hypothesis(
        "groups-by-position", "the advantages compare blocks of consecutive rows, not the rows of a group_id", _blocks
    ),
    _hypothesis(
        "groups-tiled", "the advantages compare every n-th row, as if the prompts were tiled, not a group_id", _tiled
    ),
    _hypothesis(
        "groups-within-rank",
        "the advantages compare only those rows of a group_id that are on one rank",
        _within("rank"),
        "rank",
    ),
    _hypothesis(
        "groups-are-ranks", "the advantages compare all rows of a rank, not those of a group_id", _by("rank"), "rank"
    ),
    _hypothesis(
        "groups-within-micro-batch",
        "the advantages compare only those rows of a group_id that are in one micro-batch",
        _within("micro_batch_id"),
        "micro_batch_id",
    ),
    _hypothesis(
        "groups-are-trajectories",
        "the advantages compare the segments of one trajectory, not the rows of a group_id",
        _by("trajectory_id"),
        "trajectory_id",
    ),
    _hypothesis("group-is-batch", "the advantages compare all rows of the step, not those of a group_id", _whole),
    _hypothesis("group-is-row", "every row is its own group, so no row has a baseline", _single),
)

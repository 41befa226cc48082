"""Hypotheses about advantages that are solved on some logged values: their order, and the blocks they compare."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from math import lgamma, log
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import rounding
from rolloutdoctor.ops.rounding import Radius
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.search.hypotheses import partitions, row_order
from rolloutdoctor.search.hypotheses.hypothesis import AdvantagesEdit, Family, Hypothesis, Seen, has_groups
from rolloutdoctor.search.hypotheses.partitions import places, regrouped, usual_size
from rolloutdoctor.search.hypotheses.row_order import moved_rewards

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch

LARGEST_STEP = 512
"""Rows by which a column is tried to be off, and rows of a block."""

ENOUGH_BITS = 12.0
"""Bits of evidence needed that values are not the same in another order by chance."""

Step = tuple[Evaluation, Tensor]
"""An evaluation, and the logged advantages of its rows, ``[N]``."""


def logged_steps(trials: Sequence[Sequence[Seen]]) -> list[Step]:
    """The steps of which advantages were logged."""
    return [
        (step.evaluation, filled_advantages(step.evaluation, step.advantage_N))
        for trial in trials
        for step in trial
        if step.evaluation.rows is not None
        and step.evaluation.rows.advantage_N is not None
        and step.advantage_N is not None
    ]


def filled_advantages(evaluation: Evaluation, logged_N: Tensor) -> Tensor:
    """The logged advantages; the recomputed one where none was logged, or a mask left 0 of it."""
    rows = evaluation.rows
    assert rows is not None
    missing_N = logged_N.isnan()
    if rows.rejected_N is not None:
        missing_N = missing_N | (rows.rejected_N & (logged_N == 0))
    return torch.where(missing_N, recomputed(evaluation)[0], logged_N)


def recomputed(evaluation: Evaluation) -> tuple[Tensor, Tensor]:
    """Recomputed advantages and their radii, ``[N]``."""
    assert evaluation.rows is not None
    value_N = evaluation.rows.advantage_N
    assert value_N is not None
    return value_N.nan_to_num(0.0), advantage_radius(evaluation).likely.expand(len(value_N))


def units(batch: "RolloutBatch", unit: str) -> Tensor | None:
    """Return the number of the group, rank or step of each row, ``[N]`` int64."""
    if unit == "group":
        return None if batch.groups is None else batch.groups.index_N
    rank_N = batch.per_row.get("rank") if unit == "rank" else torch.zeros_like(places(batch))
    return None if rank_N is None else torch.unique(rank_N, return_inverse=True)[1]


def by_unit(unit_N: Tensor, value_N: Tensor) -> Tensor:
    """Rows by unit, and by value within it."""
    order_N = value_N.argsort(stable=True)
    return order_N[unit_N[order_N].argsort(stable=True)]


def advantages_of(evaluation: Evaluation, batch: "RolloutBatch | None", objective: Objective) -> Tensor | None:
    """The advantages of other rows under an objective, ``[N]``; None where they cannot be computed."""
    try:
        rows = None if batch is None else evaluate_rows(batch, objective, evaluation.dtype)
    except (CannotComputeError, UsageError):
        return None
    return None if rows is None else rows.advantage_N


_Solve = Callable[[Sequence[Sequence[Seen]]], Iterator[Hypothesis]]


def advantage_family(
    name: str, code: str, words: str, solve: _Solve, applies: Callable[[Objective], bool] = has_groups
) -> Family:
    """Return a family of hypotheses about advantages."""
    return Family(name, code, "advantages", words, solve, applies, frozenset({"rank", "rewards"}))


# Order.

_order = partial(
    Hypothesis, code="RDI004", stage="advantages", remedy=row_order.REMEDY, references=row_order.REFERENCES
)


def _reordered(unit: str) -> AdvantagesEdit:
    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius] | None:
        unit_N = units(evaluation.batch, unit)
        if unit_N is None:
            return None
        value_N, radius_N = recomputed(evaluation)
        source_N = torch.empty_like(unit_N)
        source_N[by_unit(unit_N, filled_advantages(evaluation, logged_N))] = by_unit(unit_N, value_N)
        return value_N[source_N], Radius.of(radius_N[source_N])

    return edit


def _order_bits(evaluation: Evaluation, logged_N: Tensor, unit: str) -> float:
    """Binary logarithm of the multisets that the units could have had: of d different values n."""
    unit_N, bits = units(evaluation.batch, unit), 0.0
    value_N, radius_N = recomputed(evaluation)
    off_N = (value_N - logged_N).abs() > 2 * radius_N
    for number in [] if unit_N is None else torch.unique(unit_N[off_N]).tolist():
        value_n = value_N[unit_N == number].float()
        n, d = len(value_n), len(torch.unique(value_n))
        bits += (lgamma(n + d) - lgamma(d) - lgamma(n + 1)) / log(2)
    return bits


@cache
def _moved(column: str, rows: int) -> Hypothesis:
    side, count = "late" if rows > 0 else "early", "" if abs(rows) == 1 else f" {abs(rows)} places"
    words = f"every row has the {column} of the row{count} {'before' if rows > 0 else 'after'} it"
    name = f"{column}s-{abs(rows)}-rows-{side}"
    if column == "reward":
        return _order(name=name, words=words, rows=moved_rewards(lambda batch: places(batch).roll(rows)))

    def edit(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius]:
        value_N, radius_N = recomputed(evaluation)
        return value_N.roll(rows), Radius.of(radius_N.roll(rows))

    return _order(name=name, words=words, advantages=edit)


def _solve_order(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    steps = logged_steps(trials)
    if not steps:
        return
    evaluation, logged_N = max(steps, key=lambda step: len(torch.unique(step[1].float())))
    value_N, radius_N = recomputed(evaluation)
    fitting: list[tuple[int, str, int]] = []
    for rows in range(1, min(len(value_N) // 2, LARGEST_STEP) + 1):
        for by, column in product((rows, -rows), ("reward", "advantage")):
            made_N: Tensor | None = value_N.roll(by)
            if column == "reward":
                edit = _moved(column, by).rows
                assert edit is not None
                objective = evaluation.objective
                made_N = advantages_of(evaluation, edit(evaluation.batch, objective), objective)
            if made_N is not None:
                near_N = (made_N - logged_N).abs() <= 2 * radius_N.max().clamp(max=1e-3)
                fitting.append((-int(near_N.sum()), column, by))
    fitting.sort(key=lambda fit: (fit[0], fit[1] == "advantage", abs(fit[2])))
    yield from (_moved(column, by) for _, column, by in fitting[:4])
    for unit, words in (
        ("group", "within each group the advantages, or the rewards, are in another order than the rows"),
        ("step", "the advantages of the step are in another order than its rows"),
    ):
        if sum(_order_bits(*step, unit) for step in steps) >= ENOUGH_BITS:
            yield _order(name=f"another-order-in-{unit}", words=words, advantages=_reordered(unit))


# Blocks.


@cache
def _blocks(size: int, offset: int) -> Hypothesis:
    def rows(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        return None if batch.groups is None else regrouped(batch, (places(batch) - offset) % len(batch) // size)

    after = f" from row {offset} on" if offset else ""
    return Hypothesis(
        name=f"groups-of-{size}-rows" + (f"-from-{offset}" if offset else ""),
        code=partitions.CODE,
        stage="advantages",
        words=f"the advantages compare blocks of {size} consecutive rows{after}, not the rows of a group_id",
        remedy=partitions.REMEDY,
        rows=rows,
        references=partitions.REFERENCES,
    )


def _solve_blocks(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    """Blocks whose logged advantages add up to 0, small ones first: those of several of them do so, too."""
    steps = logged_steps(trials)
    if not steps:
        return
    evaluation, logged_N = max(steps, key=lambda step: int((step[1] != 0).sum()))
    error_N = recomputed(evaluation)[1] + rounding.stored(logged_N).likely
    total, error, some = (
        torch.cat([x_N.new_zeros(1, dtype=torch.float64), x_N.double().cumsum(0)])
        for x_N in (logged_N, error_N, logged_N.abs() > 4 * error_N)
    )
    blocks = 0
    for size in range(2, min(len(logged_N), LARGEST_STEP) + 1):
        gone = (total[size:] - total[:-size]).abs() <= 2 * (error[size:] - error[:-size]) + 1e-12
        full = (some[size:] - some[:-size]) > 1
        for offset in range(size):
            is_clear = bool(gone[offset::size].all()) and int(full[offset::size].sum()) > 1
            if blocks < 6 and is_clear and (size, offset) != (usual_size(evaluation.batch), 0):
                blocks += 1
                yield _blocks(size, offset)


def _as_logged(evaluation: Evaluation, logged_N: Tensor) -> tuple[Tensor, Radius]:
    logged_N = filled_advantages(evaluation, logged_N)
    return logged_N, rounding.stored(logged_N)


AS_LOGGED = Hypothesis(
    "as-logged", "", "advantages", "the advantages are those that were logged", "", advantages=_as_logged
)
"""No cause, but what the loss was made of where nothing explains the advantages."""


def _centres(objective: Objective) -> bool:
    rule = objective.advantage
    return (rule.spec.is_standard_score or rule.spec.name == "rloo") and not (rule.whitened or rule.normalised)


BLOCKS = advantage_family(
    "blocks",
    partitions.CODE,
    "the advantages compare blocks of consecutive rows, of any size and from any row on",
    _solve_blocks,
    _centres,
)
ORDER = advantage_family(
    "order",
    "RDI004",
    "rewards or advantages are any number of rows late or early, or in another order in their groups or step",
    _solve_order,
)

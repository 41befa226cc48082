"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from dataclasses import replace

from rules.row_boundaries import RowBoundary, count, near

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.turns import Turns
from rolloutdoctor.testing import toy_batch, toy_turns

QUIET = "clean|skipped"


def responses(
    loops: int,
    rows: int,
    *,
    length: int = 128,
    same: int = 120,
    step: int = 0,
    paid: Sequence[float] = (),
    cut: int = 0,
) -> RolloutBatch:
    """Responses of different tokens; the first ones end with one token so many times.

    Args:
        loops: how many of them do.
        rows: how many responses there are.
        length: of each.
        same: how often the one token comes, so that ``same - 16`` of ``length - 15`` 16-grams occurred before.
        step: its number.
        paid: reward of each response that loops, beside one that does not and has 0; else each is a group of its own.
        cut: how many of those that loop were cut off.
    """
    looping = [*range(1, length - same + 1), *[7] * same]
    order = [row % 2 == 0 and row < 2 * loops if paid else row < loops for row in range(rows)]
    rewards = [[paid[row // 2] if row < 2 * loops else 0, 0] for row in range(0, rows, 2)] if paid else [[0]] * rows
    ids = [looping if loop else list(range(length)) for loop in order]
    batch = toy_batch(rewards, lengths=length, per_token={"response_ids": ids}, step=step)
    cut_off = [row for row, loop in enumerate(order) if loop][:cut]
    return replace(batch, statuses=["length" if row in cut_off else "stop" for row in range(rows)]) if cut else batch


def repeating(share: float) -> RolloutBatch:
    """Four responses of which such a share of 200 16-grams occurred before."""
    return responses(4, 4, length=215, same=round(200 * share) + 16)


def rewarded(errors: float) -> RolloutBatch:
    """16 looping responses with half a reward more than their groups in the mean, and so many standard errors of it."""
    spread = 15**0.5 / errors
    return responses(16, 170, paid=[1 + spread * (-1) ** row for row in range(16)], cut=16)


def growing(last: int) -> list[RolloutBatch]:
    """Four steps of 40 responses: in the first none is in a loop, and in the last so many."""
    return [responses(loops, 40, step=step) for step, loops in enumerate((0, 3, 3, last))]


def calling(*steps: Sequence[int], failing: int = 0) -> list[RolloutBatch]:
    """Steps of responses with up to two turns of a tool; of so many responses of a step the first call fails."""
    batches, both = [], [("model", 0, 1), ("tool", 1, 2), ("model", 2, 3), ("tool", 3, 4), ("model", 4, 5)]
    for step, calls in enumerate(steps):
        turns = toy_turns(*(both[: 1 + 2 * call] for call in calls))
        errors = ["down" if row < failing and author == 1 else None for row, author in _rows_of(turns)]
        batches.append(
            replace(toy_batch([[1, 0]] * (len(calls) // 2), lengths=5, step=step), turns=replace(turns, errors=errors))
        )
    return batches


def _rows_of(turns: Turns) -> list[tuple[int, int]]:
    """Row and author of each turn."""
    return list(zip(turns.row_K.tolist(), turns.author_K.tolist(), strict=True))


BOUNDARIES: list[RowBoundary] = [
    count("RDT011", "least", 113, lambda x: responses(4, 4, length=x + 15), "skipped", "info"),
    near("RDT011", "loops_from", 0.5, repeating, QUIET, "info"),
    count("RDT011", "fewest_looping", 3, lambda x: responses(x, 9), QUIET, "info"),
    # 16 of 33, and 17.
    RowBoundary("RDT011", "cut_from", responses(33, 33, cut=16), responses(33, 33, cut=17), ("info", "warning")),
    # 3 of 309, and of 291.
    RowBoundary("RDT011", "info_above", responses(3, 309), responses(3, 291), (QUIET, "info")),
    # 10 of 103, and of 97.
    RowBoundary(
        "RDT011",
        "warn_above",
        *(responses(10, rows, cut=10) for rows in (103, 97)),
        ("info", "warning"),
    ),
    # None of which a tenth could loop, and not less.
    RowBoundary("RDT011", "warn_above", responses(0, 101), responses(0, 94), ("clean", "skipped")),
    count("RDT011", "fewest", 10, lambda x: responses(x, 20, cut=x), "info", "warning"),
    count("RDT011", "fewest", 10, lambda x: responses(x, 120, paid=[1] * x, cut=x), "info", "warning: .*rewarded"),
    near("RDT011", "errors", 3.0, rewarded, "info", "warning: .*rewarded"),
    # Seven or eight more of 40: 2.9 and 3.2 standard errors.
    RowBoundary("RDT011", "errors", growing(7), growing(8), ("info", "warning")),
    count("RDT020", "lasting", 3, lambda n: calling(*[[1, 1]] * 4, *[[0, 0]] * n), "clean", "warning"),
    # One of 9 or 11 steps before, and the last three: chances of 1.4 and 0.75 in 1,000.
    RowBoundary(
        "RDT020",
        "chance",
        *(calling([0, 0], *[[1, 1]] * others, *[[0, 0]] * 3) for others in (8, 10)),
        ("clean", "warning"),
        factor=1.5,
    ),
    RowBoundary(
        "RDT020",
        "failing",
        *(calling(*[[1] * 100] * 3, failing=failing) for failing in (89, 90)),
        ("clean", "warning"),
    ),
    count("RDT021", "lasting", 3, lambda n: calling(*[[0, 2] * 4] * 4, *[[2] * 8] * n), "clean", "warning"),
    RowBoundary("RDT021", "fewest", *(calling(*[[0, 2]] * 4, *[[2] * 2] * n) for n in (3, 4)), ("clean", "warning")),
    RowBoundary(
        "RDT021",
        "chance",
        *(calling([2] * 4, *[[0, 2] * 2] * others, *[[2] * 4] * 3) for others in (8, 10)),
        ("clean", "warning"),
        factor=1.5,
    ),
]

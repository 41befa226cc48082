"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import sqrt

import torch
from rules.row_boundaries import RowBoundary, count, near

from rolloutdoctor.data.answers import EQUAL, IN_MODEL, IN_TOOL, NOWHERE, OTHER
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.bounds import share_bound
from rolloutdoctor.testing import toy_batch

GRPO = {"trainer": "verl", "adv_estimator": "grpo"}
TRL = {"trainer": "trl"}
PER_ROW = {**TRL, "loss_type": "grpo", "beta": 0.0}
PER_TURN = {**TRL, "scale_rewards": "none"}
DAPO = {**TRL, "loss_type": "dapo"}
QUIET = "clean|skipped"


def by_function(rewards: Sequence[Sequence[float]], **functions: Sequence[float]) -> RolloutBatch:
    """Rows with reward functions, one number of each for every row."""
    return replace(
        toy_batch(rewards), rewards={name: torch.tensor(x, dtype=torch.float64) for name, x in functions.items()}
    )


def residue(logged: float) -> RolloutBatch:
    """Two equal rewards with such an advantage."""
    return toy_batch([[2, 2], [1, 0]], per_row={"advantage": [logged, logged, 0.5, -0.5]})


def escaped(share: float) -> RolloutBatch:
    """Eight tokens of equal rewards that rounding keeps in the loss, such a share of all."""
    others = round(8 / share - 8) // 2
    return toy_batch([[0.7] * 8, [1, 0]], lengths=[1] * 8 + [others] * 2, policy=-0.5, rollout=-0.5)


def noise(logged: float, ulps: int = 1) -> RolloutBatch:
    """A reward of 1 and one so many float32 roundings above it, with such an advantage."""
    return toy_batch([[1, 1 + ulps * 2.0**-23], [1, 0]], per_row={"advantage": [-logged, logged, 0.7, -0.7]})


def phantom(share: float) -> RolloutBatch:
    """A group of failures that a shaping term tells apart, with such a share of the advantage."""
    functions = {"correct": [0.0, 0.0, 1.0, 0.0], "brief": [0.1, 0.0, 0.1, 0.0]}
    batch = by_function([[0.1, 0], [1.1, 0]], **functions)
    logged = torch.tensor([share, -share, 1 - share, share - 1], dtype=torch.float64)
    return replace(batch, per_row={**batch.per_row, "advantage": logged})


def inert(pairs: int, size: float) -> RolloutBatch:
    """Pairs of a right and a wrong response, with a term of the prompt that is 0 or `size`."""
    hard = [size * (pair % 2) for pair in range(pairs)]
    return by_function(
        [[1 + one, one] for one in hard], correct=[1.0, 0.0] * pairs, hard=[one for one in hard for _ in range(2)]
    )


def edges(groups: int) -> RolloutBatch:
    """Groups of eight with one right response, and one with four."""
    return toy_batch([*[[1] + [0] * 7] * groups, [1] * 4 + [0] * 4], lengths=1)


def against_length(pairs: int, more: int) -> RolloutBatch:
    """Pairs of a right and a wrong response; the right one is the longer in so many more of them than the shorter."""
    longer = (pairs + more) // 2
    return toy_batch([[1, 0]] * pairs, lengths=[2, 1] * longer + [1, 2] * (pairs - longer))


def in_micro_batches(*lengths: int) -> RolloutBatch:
    """Four responses in micro-batches of two: each token weighs 1 by the tokens of its micro-batch."""
    return toy_batch([[1, 0], [0, 1]], lengths=lengths, per_row={"micro_batch_id": [0, 0, 1, 1]})


def answers(told: Sequence[tuple[int, int, float]]) -> RolloutBatch:
    """Responses whose answers compare with the reference so, each so many times, with such a reward."""
    kinds = [answer for answer, many, _ in told for _ in range(many)]
    row = {"response": range(1, len(kinds) + 1), "ground_truth": range(1, len(kinds) + 1), "stated_answer": kinds}
    rewards = [reward for _, many, reward in told for _ in range(many)]
    return toy_batch([rewards], lengths=1, per_row={name: list(x) for name, x in row.items()})


def failing(failed: int, groups: int) -> RolloutBatch:
    """So many groups, in some of which every response failed."""
    rewards = [[0.0, 0.0] if group < failed else [1.0, 0.0] for group in range(groups)]
    statuses = ["error" if group < failed else "stop" for group in range(groups) for _ in range(2)]
    return replace(toy_batch(rewards, lengths=1), statuses=statuses)


def of_the_last(rows: int) -> RolloutBatch:
    """A trajectory with so many turns before the last, whose advantage all of them have, and one of a single turn."""
    rewards = [float(turn) for turn in range(rows + 2)]
    mean = sum(rewards) / len(rewards)
    advantages = [rewards[rows] - mean] * (rows + 1) + [rewards[-1] - mean]
    return toy_batch([rewards], per_row={"trajectory_id": [0] * (rows + 1) + [1], "advantage": advantages})


BOXED, MARKED = 4, 8
"""Forms in which an answer is stated."""


@cache
def seen_where(found: int, bound: float, side: int = 0) -> int:
    """How many must be seen for so many found to have such a bound of their share."""
    return min(range(max(found, 1), 1000), key=lambda seen: abs(share_bound(found, seen)[side] - bound))


def contradicted(answer: int, bound: float) -> RolloutBatch:
    """Six contradictions of as many answers as it takes for a lower bound of their share."""
    wrong, right = (0.0, 1.0) if answer == EQUAL else (1.0, 0.0)
    return answers([(answer + BOXED, 6, wrong), (answer + BOXED, seen_where(6, bound) - 6, right)])


def copies(noisy: int, *, ratio: float = 1.0, calm: int = 0) -> RolloutBatch:
    """Groups of two equal responses and another one.

    Args:
        noisy: groups in which the rewards of the equal ones are 0 and 1.
        ratio: of their squared difference to the mean squared difference in their group.
        calm: groups in which they are 1 and 1, as far below half of the mean as others are above.
    """
    rewards = [[0, 1, 1 + sqrt(2 / ratio - 1)]] * noisy + [[1, 1, 1 + sqrt(2)]] * calm
    ids = [[one] for _ in rewards for one in (5, 5, 6)]
    return toy_batch(rewards, lengths=1, per_token={"response_ids": ids})


def differing(pairs: int) -> RolloutBatch:
    """Pairs of equal responses that differ by a little more than 1 % of the range, and four by a little less."""
    rewards = [[0, 1.1, 0]] * pairs + [[0, 0.9, 0]] * 4 + [[0, 100]]
    ids = [[one] for group in rewards for one in (5, 5, 6)[-len(group) :]]
    return toy_batch(rewards, lengths=1, per_token={"response_ids": ids})


def repeated(seen: int) -> RolloutBatch:
    """Responses that repeat one with the same reward, and another one."""
    return toy_batch([[1] * (seen + 1) + [0]], lengths=1, per_token={"response_ids": [[5]] * (seen + 1) + [[6]]})


def from_tools(found: int, seen: int) -> RolloutBatch:
    """Answers that only a tool wrote, and so many of them rewarded; others that the model wrote, and nobody."""
    places = [(IN_TOOL, found, 1.0), (IN_TOOL, seen - found, 0.0), (IN_MODEL, 4, 1.0), (NOWHERE, 4, 0.0)]
    return answers([(64 * place, many, reward) for place, many, reward in places])


def spending(steps: int, *, fall: float = 0.5, against: int = 0) -> list[RolloutBatch]:
    """Steps that reinforce likely tokens, all but some, with an entropy that falls by a share half-way."""
    found = []
    for step in range(steps):
        likely = [[-0.5], [-1.5]] if step >= against else [[-1.5], [-0.5]]
        entropy = 1.0 if step < steps / 2 else 1 - fall
        more = {"entropy": [[entropy]] * 2}
        found.append(toy_batch([[1, 0]], lengths=1, old=likely, policy=likely, per_token=more, step=step))
    return found


def lagging(step: int, lags: Sequence[int], lengths: Sequence[int] | None = None, dropped: int = 0) -> RolloutBatch:
    """Responses of 1, 2, 3 tokens and so on that are so many versions old; the last `dropped` are not trained."""
    lengths = list(range(1, len(lags) + 1)) if lengths is None else lengths
    trained = [1] * (len(lags) - dropped) + [0] * dropped
    return toy_batch(
        [[row % 2] for row in range(len(lags))],
        mask=[[one] * length for one, length in zip(trained, lengths, strict=True)],
        per_row={f"policy_version_{end}": [100 - lag for lag in lags] for end in ("min", "max")},
        step=step,
    )


def beside_short(last: int) -> list[RolloutBatch]:
    """Nine steps in which half of 20 responses are three versions old, with two short ones, in the last so many."""
    return [
        lagging(step, [3 * (row > 10 or 4 - short < row <= 4) for row in range(1, 21)])
        for step, short in enumerate([2] * 8 + [last])
    ]


def at_bound_in(steps: int) -> list[RolloutBatch]:
    """21 steps in which half of the responses are three versions old, or two."""
    return [lagging(step, [(3 if step < steps else 2) * (row > 10) for row in range(1, 21)]) for step in range(21)]


def at_bound(rows: int, places: Sequence[int], steps: int = 9) -> list[RolloutBatch]:
    """Steps in which the responses at these places by length are three versions old, and no other is."""
    return [lagging(step, [3 * (row in places) for row in range(1, rows + 1)]) for step in range(steps)]


def longest_at_bound(twice: int) -> list[RolloutBatch]:
    """16 steps of 20 responses in which lag goes with length; of the four longest one is at the bound, or two are."""
    lags = [0] * 7 + [1] * 6 + [2] * 5
    return [lagging(step, [*lags, 3 if step < twice else 2, 3]) for step in range(16)]


def long_dropped(counts: Sequence[int], rows: int, spread: int = 0) -> list[RolloutBatch]:
    """Steps in which so many responses of 50 tokens, more or less by `spread`, are dropped, beside those of 10.

    The longest response of the run is a trained one, and of a step in which none is dropped.
    """
    longest = lagging(len(counts), [0] * rows, [10] * (rows - 1) + [200])
    return [
        lagging(
            step,
            [0] * (rows - gone) + [5] * gone,
            [10] * (rows - gone) + [50 + spread * (-1) ** one for one in range(gone)],
            gone,
        )
        for step, gone in enumerate(counts)
    ] + [longest]


def group_dropped(lags: Sequence[int]) -> list[RolloutBatch]:
    """Eight steps in which a long group of these lags is dropped, beside twelve short responses of lag 2."""
    every = [*lags, *[2] * 12]
    return [
        toy_batch(
            [[1.0, 0.0, 0.0, 1.0]] * 4,
            mask=[[0] * 50] * 4 + [[1] * length for length in [10] * 11 + [200]],
            per_row={"policy_version_min": [9 - lag for lag in every], "policy_version_max": [9] * 16},
            step=step,
        )
        for step in range(8)
    ]


def split(groups: int, others: int) -> RolloutBatch:
    """Groups of one response to the same prompt, and groups of two to others."""
    prompts = [1] * groups + [2 + group for group in range(others) for _ in range(2)]
    return toy_batch([[1.0]] * groups + [[1.0, 0.0]] * others, lengths=1, per_row={"prompt_ids": prompts})


def branched(rows: int, others: int) -> RolloutBatch:
    """Two trajectories of so many rows."""
    rewards = [[float(row % 2) for row in range(rows + others)]]
    return toy_batch(rewards, lengths=1, per_row={"trajectory_id": [0] * rows + [1] * others})


def cut_up(step: int, rows: int, updates: int) -> RolloutBatch:
    """Twenty trajectories of so many rows each, in so many optimizer steps."""
    count = 20 * rows
    columns = {
        "trajectory_id": [row // rows for row in range(count)],
        "optim_step_id": [row * updates // count for row in range(count)],
    }
    return toy_batch([[float(row % 2) for row in range(count)]], lengths=1, policy=None, per_row=columns, step=step)


BOUNDARIES: list[RowBoundary] = [
    near("RDA003", "warn_above", 0.01, residue, "info", "error", **GRPO),
    near("RDA003", "warn_above", 0.01, escaped, "info", "warning", trainer="prime-rl"),
    near("RDA007", "warn_above", 0.01, noise, "clean", "warning", **GRPO),
    RowBoundary("RDA007", "noise_ulps", noise(0.5, 4), noise(0.5, 5), ("warning", "clean"), GRPO),
    near("RDA008", "warn_above", 0.25, phantom, "info", "warning", **TRL),
    RowBoundary("RDA009", "least_bits", inert(19, 1.0), inert(20, 1.0), ("info", "warning"), TRL),
    RowBoundary("RDA009", "some_bits", inert(7, 1.0), inert(8, 1.0), ("skipped", "info"), TRL),
    near("RDA009", "warn_above", 0.1, lambda x: inert(20, sqrt(x / (1 - x))), "info", "warning", **TRL),
    count("RDA011", "fewest", 8, lambda x: toy_batch([[1, 1]] * x, lengths=1), "info", "error"),
    count("RDA011", "fewest", 8, lambda n: failing(n, n + 1), "info", "warning"),
    near("RDA011", "failing_from", 0.5, lambda x: failing(round(100 * x), 100), "info", "warning"),
    # The share of the advantages of these groups is 1.07 and 1.136 times what it is without the division.
    RowBoundary("RDA012", "grows_by", edges(11), edges(5), ("clean", "info"), TRL),
    # Token weights by length to the power of -0.48 and of -0.52.
    RowBoundary(
        "RDA013",
        "exponent_from",
        in_micro_batches(1, 1, 1, 8),
        in_micro_batches(2, 3, 3, 6),
        (QUIET, "info"),
        {**TRL, "loss_type": "bnpo"},
    ),
    # Correlations of 0.29 and 0.31, and of 4.8 and 5.2 standard errors.
    RowBoundary(
        "RDA013",
        "correlation_from",
        against_length(200, 58),
        against_length(200, 62),
        (QUIET, "info"),
        DAPO,
    ),
    RowBoundary(
        "RDA013",
        "errors",
        against_length(50, 24),
        against_length(50, 26),
        (QUIET, "info"),
        DAPO,
    ),
    near("RDA014", "share_from", 0.05, lambda x: contradicted(EQUAL, x), "info", "warning"),
    near("RDA014", "share_from", 0.05, lambda x: contradicted(OTHER, x), "info", "warning"),
    count("RDA014", "fewest", 3, lambda x: answers([(EQUAL + BOXED, x, 0), (EQUAL + BOXED, 1, 1)]), QUIET, "warning"),
    # Three right answers are not rewarded, one or none of them in a way that never is.
    count(
        "RDA014",
        "fewest",
        3,
        lambda x: answers([(EQUAL + BOXED, x, 0), (EQUAL + BOXED, 1, 1), (EQUAL + MARKED, 3 - x, 0)]),
        "info",
        "warning",
    ),
    # One right answer more that is not rewarded, so that it is told anyway.
    count(
        "RDA014",
        "fewest",
        3,
        lambda x: answers([(OTHER + BOXED, x, 1), (OTHER + BOXED, 1, 0), (EQUAL + BOXED, 1, 0), (EQUAL + BOXED, 1, 1)]),
        "info",
        "warning",
    ),
    count(
        "RDA014",
        "fewest",
        3,
        lambda x: answers([(0, x, 1), (EQUAL + BOXED, 200, 1), (OTHER + BOXED, 200, 0)]),
        "clean",
        "info",
    ),
    count("RDA014", "fewest", 3, lambda x: answers([(0, 3, 1), (EQUAL + BOXED, x, 1)]), "skipped", "info"),
    near(
        "RDA014",
        "limit",
        0.1,
        lambda x: answers([(EQUAL + BOXED, seen_where(0, x, 1), 1)]),
        "clean",
        "skipped",
    ),
    near("RDA015", "warn_above", 0.5, lambda x: copies(12, ratio=x), "info", "warning"),
    # 10 of 12 copies more above the half than below, and 11 of 13: 2.89 and 3.05 standard errors.
    RowBoundary("RDA015", "errors", copies(11, calm=1), copies(12, calm=1), ("info", "warning")),
    near(
        "RDA015",
        "rounding",
        0.01,
        lambda x: toy_batch([[0, x, 1]], lengths=1, per_token={"response_ids": [[5], [5], [6]]}),
        QUIET,
        "info",
    ),
    count("RDA015", "fewest", 10, differing, "info", "warning"),
    near("RDA015", "limit", 0.1, lambda x: repeated(seen_where(0, x, 1)), "clean", "skipped"),
    near("RDA016", "share_from", 0.1, lambda x: from_tools(6, seen_where(6, x)), "info", "warning"),
    count("RDA016", "fewest", 3, lambda x: from_tools(x, 9), QUIET, "info|warning"),
    count("RDA017", "fewest", 10, spending, "skipped", "info", **TRL),
    near("RDA017", "fall", 0.3, lambda x: spending(12, fall=x), "clean", "info", **TRL),
    # 14 of 22 and 15 of 23: 2.98 and 3.13 standard errors.
    RowBoundary("RDA017", "errors", spending(22, against=4), spending(23, against=4), ("clean", "info"), TRL),
    count("RDA018", "fewest_steps", 8, lambda x: at_bound(20, range(11, 21), x), "skipped", "info"),
    RowBoundary(
        "RDA018",
        "fewest_rows",
        *([*at_bound(12, range(7, 13), 8), lagging(8, [0] * rows)] for rows in (3, 4)),
        ("skipped", "info"),
    ),
    # The ranks of ten of twenty add up to 22 or 24 more than they would by chance: correlations of 0.38 and 0.42.
    RowBoundary(
        "RDA018",
        "correlation_from",
        at_bound(20, (5, 6, 7, 9, 11, 15, 17, 18, 19, 20)),
        at_bound(20, (5, 6, 7, 9, 12, 16, 17, 18, 19, 20)),
        (QUIET, "info"),
    ),
    # Of eight of sixteen, in eight steps: 4.9 and 5.2 standard errors.
    RowBoundary(
        "RDA018",
        "errors",
        at_bound(16, (4, 5, 7, 10, 13, 14, 15, 16), 8),
        at_bound(16, (4, 5, 7, 11, 13, 14, 15, 16), 8),
        (QUIET, "info"),
    ),
    # 19 or 20 of the 64 longest.
    RowBoundary("RDA018", "at_bound", longest_at_bound(3), longest_at_bound(4), (QUIET, "info")),
    # All of the 36 longest, and 19 or 17 of the shortest; 15 or 16 of the steps.
    RowBoundary("RDA018", "times_short", beside_short(3), beside_short(1), (QUIET, "info")),
    RowBoundary("RDA018", "steps_from", at_bound_in(15), at_bound_in(16), (QUIET, "info")),
    count(
        "RDA018", "fewest_dropped", 10, lambda x: long_dropped([2] * (x - 8) + [1] * (16 - x), 16), "info", "warning"
    ),
    # 10 or 11 of 208 responses.
    RowBoundary(
        "RDA018",
        "dropped_from",
        *(long_dropped([2] * (gone - 7) + [1] * (14 - gone), 26) for gone in (10, 11)),
        ("info|clean", "warning"),
    ),
    # Of 16, a mean of 40 tokens beyond the others with such a spread: 4.8 and 5.2 standard errors.
    RowBoundary("RDA018", "errors", *(long_dropped([2] * 8, 20, spread) for spread in (32, 30)), ("info", "warning")),
    # Older than the others by 4.7 and 5.4 standard errors.
    RowBoundary("RDA018", "errors", group_dropped((5, 4, 3, 1)), group_dropped((5, 4, 2, 2)), (QUIET, "warning")),
    # Correlations of 0.49 and 0.51.
    RowBoundary("RDA019", "share_from", against_length(200, 98), against_length(200, 102), (QUIET, "info")),
    # Correlations of 4.9 and 5.1 standard errors.
    RowBoundary("RDA019", "errors", against_length(40, 22), against_length(41, 23), (QUIET, "info")),
    count("RDA022", "fewest", 8, lambda groups: split(groups, 1), "clean", "warning", **GRPO),
    # 17 and 18 of 35 groups.
    RowBoundary("RDA022", "share_from", split(17, 18), split(18, 17), ("clean", "warning"), GRPO),
    # A part that is moved of (a - b) / 2 (a + b).
    RowBoundary("RDA023", "info_from", branched(52, 50), branched(50, 48), ("clean", "info"), PER_ROW),
    # 14 or 15 updates of 10.
    RowBoundary("RDA025", "warn_from", *([cut_up(0, 1, 10), cut_up(1, 2, n)] for n in (14, 15)), ("info", "warning")),
    count("RDA027", "fewest", 8, of_the_last, "skipped", "error", **PER_TURN),
    RowBoundary("RDA023", "warn_from", branched(61, 41), branched(59, 39), ("info", "warning"), PER_ROW),
]

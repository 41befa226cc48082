"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from math import exp, log

from rules.integrity.boundaries import count, near, rewards
from rules.row_boundaries import RowBoundary

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.testing import toy_batch

BFLOAT16 = [k / 128 for k in range(129, 256) if k % 2]
"""Numbers between 1 and 2 of which none has four decimal digits or less, but for a few."""
ONCE = {
    "trainer": "verl",
    "adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "actor.ppo_mini_batch_size": 64,
    "actor.ppo_epochs": 1,
}


def centre(eighths: int, power: int) -> float:
    """Centre of one of the bins of sizes, four to a doubling: 9, 11, 13 or 15 eighths of a power of two."""
    return eighths / 8 * 2.0**power


def gapped(
    gaps: Sequence[float],
    *,
    old: Sequence[float] | None = None,
    apart: float | None = None,
    versions: Sequence[int] | None = None,
    rows: int = 2,
    length: int = 100,
) -> list[RolloutBatch]:
    """Steps in which sampler and trainer are so far apart.

    Args:
        gaps: of each step.
        old: of the half of the rows that are one version behind; None: no row is.
        apart: trainer and reference.
        versions: newest one of each step.
        rows: of a step.
        length: of a row.
    """
    found = []
    for step, gap in enumerate(gaps):
        behind = [row % 2 if old is not None else 0 for row in range(rows)]
        rollout = [[-1.0 - (old[step] if lag and old is not None else gap)] * length for lag in behind]
        newest = step + 1 if versions is None else versions[step]
        per_row = {"policy_version_min": [newest - lag for lag in behind], "policy_version_max": [newest] * rows}
        stamps = {} if versions is None and old is None else per_row
        ref = None if apart is None else -1.0 - apart
        found.append(toy_batch(rewards(rows), lengths=length, rollout=rollout, ref=ref, per_row=stamps, step=step))
    return found


def turned(ratio: float) -> list[RolloutBatch]:
    """Rows whose first half has so many times the gap of the second."""
    rollout = [[-1.0 - 0.01 * ratio] * 64 + [-1.01] * 64] * 4
    return [toy_batch(rewards(4), lengths=128, rollout=rollout, step=step) for step in range(4)]


def confident(tokens: int) -> RolloutBatch:
    """Tokens, so many, of which the sampler alone was sure."""
    rollout = [-0.1] * tokens + [-3.0] * (8 - tokens)
    return toy_batch(rewards(2), lengths=8, policy=-3.0, rollout=[rollout, [-3.0] * 8])


def row_apart(others: int) -> RolloutBatch:
    """A row of twelve tokens that are far off, beside seven with so many that are not."""
    lengths = [12, *[7] * 6, others - 42]
    rollout = [[-1.0 - (0.0 if row else 0.5)] * length for row, length in enumerate(lengths)]
    return toy_batch(rewards(8), lengths=lengths, rollout=rollout)


def scaled(slope: float, contexts: int = 40) -> RolloutBatch:
    """Prompts of which four first tokens each have log-probs on a line of this slope."""
    old = [-0.5 - 0.8 * row for row in range(4)]
    return toy_batch(
        [[0.0] * 4] * contexts,
        lengths=1,
        policy=[[each] for each in old] * contexts,
        rollout=[[slope * each + 0.2] for each in old] * contexts,
    )


def surprising(share: float, rows: int = 100) -> RolloutBatch:
    """Tokens with a log-prob that is above the entropy by a share of it."""
    return toy_batch(rewards(rows), lengths=1, policy=-2.0 * (1 + share), per_token={"entropy": 2.0})


def sided(tokens: int, *parts: tuple[float, int], rest: float = 0.1) -> RolloutBatch:
    """Tokens of which the sampler's log-probs are above the trainer's: by `rest`, or by what `parts` say of so many."""
    above = [size for size, some in parts for _ in range(some)]
    above += [rest] * (tokens - len(above))
    old = [-1.0 - 2.0 * (place % 2) for place in range(tokens)]
    return toy_batch([[1.0]], lengths=tokens, policy=[old], rollout=[[x + y for x, y in zip(old, above, strict=True)]])


def rounded(values: Sequence[float]) -> RolloutBatch:
    """Log-probs of the sampler beside ones of the trainer that are not rounded."""
    old = [-1.3712 - 0.0134 * place for place in range(len(values))]
    return toy_batch([[1.0]], lengths=len(values), policy=[old], rollout=[[-x for x in values]])


def spaced(mean: float, tokens: int = 300) -> RolloutBatch:
    """Sampler's log-probs in bfloat16 of so large a mean spacing, in multiples of that at 1."""
    other, step = (2.0, 1.0) if mean > 1 else (0.5, -0.5)
    some = round(tokens * (mean - 1) / step)
    return rounded([BFLOAT16[place % len(BFLOAT16)] * (other if place < some else 1.0) for place in range(tokens)])


def passes(size: float, share: float = 1.0, *, signed: bool = False) -> list[RolloutBatch]:
    """Steps in which a share of the old log-probs is above the policy's by `size`, or above and below in turn."""
    rows, length = 64, 50
    some = round(rows * length * share)
    apart = [size * (-1 if signed and place % 2 else 1) * (place < some) for place in range(rows * length)]
    old = [[-1.0 + x for x in apart[length * row : length * row + length]] for row in range(rows)]
    return [toy_batch([[1.0, 0.0] * 4] * 8, lengths=length, old=old, step=0)]


BOUNDARIES: list[RowBoundary] = [
    RowBoundary(
        "RDO002",
        "onset_factor",
        gapped([centre(15, -6)] * 3 + [centre(13, -4)] * 3),
        gapped([centre(9, -6)] * 3 + [centre(9, -4)] * 3),
        ("clean", "warning: the sampler mismatch rises"),
    ),
    RowBoundary(
        "RDO002",
        "onset_least",
        gapped([0.001] * 3 + [centre(9, -6)] * 2 + [centre(11, -6)] * 2),
        gapped([0.001] * 3 + [centre(11, -6)] * 4),
        ("clean", "warning: the sampler mismatch rises"),
    ),
    RowBoundary(
        "RDO002",
        "first_factor",
        gapped([centre(9, -10)] + [centre(11, -7)] * 3),
        gapped([centre(11, -11)] + [centre(15, -8)] * 3),
        ("clean", "warning: .* after the first update"),
    ),
    RowBoundary(
        "RDO002",
        "first_least",
        gapped([1e-4] + [centre(15, -10)] * 4),
        gapped([1e-4] + [centre(15, -10)] * 2 + [centre(9, -9)] * 2),
        ("clean", "warning: .* after the first update"),
    ),
    RowBoundary(
        "RDO002",
        "growth_factor",
        gapped([centre(15, -5), centre(11, -4), centre(15, -4), centre(11, -3), centre(11, -2)]),
        gapped([centre(11, -5), centre(9, -4), centre(13, -4), centre(11, -3), centre(9, -2)]),
        ("clean", "warning: the sampler mismatch grows"),
    ),
    RowBoundary(
        "RDO002",
        "growth_least",
        gapped([centre(9, -7), centre(15, -7), centre(11, -6), centre(11, -5), centre(11, -4)]),
        gapped([centre(9, -7), centre(15, -7), centre(11, -6), centre(11, -5), centre(13, -4)]),
        ("clean", "warning: the sampler mismatch grows"),
    ),
    RowBoundary(
        "RDO002",
        "slow_factor",
        gapped(
            [centre(x, k) for x, k in ((15, -4), (15, -4), (9, -3), (11, -3), (13, -3), (15, -3), (11, -2), (11, -2))]
        ),
        gapped(
            [centre(x, k) for x, k in ((11, -4), (11, -4), (13, -4), (15, -4), (9, -3), (13, -3), (9, -2), (9, -2))]
        ),
        ("clean", "info: the sampler mismatch grows in the order of steps"),
    ),
    RowBoundary(
        "RDO002",
        "slow_steps",
        gapped([centre(x, k) for x, k in ((9, -4), (13, -4), (15, -4), (9, -3), (11, -3), (13, -3), (15, -3))]),
        gapped([centre(x, k) for k in (-4, -3) for x in (9, 11, 13, 15)]),
        ("clean", "info: the sampler mismatch grows in the order of steps"),
    ),
    RowBoundary(
        "RDO002",
        "lag_factor",
        gapped([centre(15, -5)] * 3, old=[centre(13, -4)] * 3, rows=4),
        gapped([centre(9, -5)] * 3, old=[centre(9, -4)] * 3, rows=4),
        ("clean", "warning: .* oldest rows"),
    ),
    RowBoundary(
        "RDO002",
        "lag_least",
        gapped([0.005] * 4, old=[centre(9, -6)] * 2 + [centre(11, -6)] * 2, rows=4),
        gapped([0.005] * 4, old=[centre(11, -6)] * 4, rows=4),
        ("clean", "warning: .* oldest rows"),
    ),
    count(
        "RDO002", "stopped_least", 8, lambda n: gapped([0.01] * n, versions=[5] * n), "clean", "warning: the version"
    ),
    near("RDO002", "turn", 4.0, turned, "clean", "warning: .* in their first part"),
    near("RDO014", "factor", 10.0, lambda x: gapped([0.02] + [0.02 * x] * 5, versions=range(6)), "skipped", "warning"),
    near("RDO014", "smaller", 3.0, lambda x: gapped([0.02] + [0.02 * x] * 5), "clean", "skipped"),
    near("RDO014", "least", 0.1, lambda x: gapped([0.001] + [x] * 5, versions=range(6)), "skipped", "warning"),
    count("RDO014", "lasting", 3, lambda n: gapped([0.01] * 6 + [0.8] * n, apart=0.01), "clean", "warning"),
    count("RDO014", "flat_steps", 5, lambda n: gapped([0.01] + [0.8] * n, versions=range(n + 1)), "clean", "warning"),
    near(
        "RDO014",
        "flat",
        1.5,
        lambda x: gapped([0.01, *[0.4] * 2, *[0.45] * 2, *[0.4 * x] * 2], versions=range(7)),
        "warning",
        "clean",
    ),
    near("RDO014", "beyond", 4.0, lambda x: gapped([0.01] * 3 + [0.1 * x] * 3, apart=0.1), "clean", "warning"),
    count("RDO001", "least_places", 3, confident, "info", "warning: the sampler gave"),
    RowBoundary("RDO001", "row_bits", row_apart(51), row_apart(59), ("info", "warning: .* disagree in")),
    count("RDO003", "least_contexts", 20, lambda n: scaled(2.0, n), "skipped", "warning"),
    RowBoundary("RDO003", "least_slope", scaled(exp(-0.02)), scaled(exp(0.02)), ("clean", "info")),
    RowBoundary("RDO003", "warn_from", scaled(exp(-0.05)), scaled(exp(0.05)), ("info", "warning")),
    RowBoundary("RDO003", "least_deviations", surprising(0.5, 34), surprising(0.5, 38), ("skipped", "warning")),
    near("RDO003", "least_excess", 0.1, surprising, "skipped", "warning"),
    count("RDO004", "least_tokens", 500, sided, "skipped", "warning"),
    near("RDO004", "least_share", 0.05, lambda x: sided(2000, (0.4, round(2000 * x)), rest=0.0), "clean", "warning"),
    near(
        "RDO004",
        "most_above",
        0.25,
        lambda x: sided(500, (0.1, 27), (-0.001, round(500 * x)), rest=0.0),
        "info",
        "clean",
    ),
    RowBoundary(
        "RDO004", "most_far", sided(5100, (-0.6, 10)), sided(4900, (-0.6, 10)), ("warning: .* renormalized", "clean")
    ),
    RowBoundary(
        "RDO004",
        "least_deviations",
        sided(550, (0.1, 32), (-1e-4, 220), rest=0.0),
        sided(550, (0.1, 36), (-1e-4, 220), rest=0.0),
        ("clean", "info"),
    ),
    RowBoundary(
        "RDO004",
        "other_side",
        sided(550, (0.07, 31), (-0.07, 3), rest=0.0),
        sided(550, (0.07, 29), (-0.07, 3), rest=0.0),
        ("info", "clean"),
    ),
    RowBoundary(
        "RDO004",
        "warn_below",
        sided(1000, (0.1, 108), rest=0.0),
        sided(1000, (0.1, 102), rest=0.0),
        ("warning", "info"),
    ),
    count(
        "RDO005",
        "least_values",
        200,
        lambda n: rounded([1.5 + place % 40 / 10 for place in range(n)]),
        "skipped",
        "warning",
    ),
    near("RDO005", "warn_from", 2.0**-7, lambda x: spaced(x * 2**7), "info", "warning"),
    near("RDO006", "clip", 1.2, lambda x: passes(log(x), signed=True), "skipped", "warning", **ONCE),
    near("RDO006", "many_beyond", 0.1, lambda x: passes(0.5, x, signed=True), "info", "warning", **ONCE),
    near("RDO006", "far", 0.01, passes, "info", "warning", **ONCE),
    near("RDO006", "some", 0.001, passes, "skipped", "info", **ONCE),
]

"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from math import exp, expm1, log, log1p

import numpy as np
from rules.integrity.boundaries import rewards
from rules.row_boundaries import RowBoundary, count, near

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
MASKED = {"trainer": "trl", "use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
UNCAPPED = {"trainer": "trl", "beta": 0.0, "loss_type": "dapo", "scale_rewards": "none"}


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


EVEN = -expm1(-0.7)
"""What a token of log-prob -0.7 has of the gradient."""


def collapsed(tokens: int, nats: float) -> RolloutBatch:
    """Tokens of log-prob 0 from the trainer and so many nats below from the sampler, beside as many of -0.7."""
    policy, rollout = [0.0, -0.7] * tokens, [-nats, -0.7] * tokens
    return toy_batch([[1.0]], lengths=2 * tokens, policy=[policy], rollout=[rollout])


def rounded(values: Sequence[float]) -> RolloutBatch:
    """Log-probs of the sampler beside ones of the trainer that are not rounded."""
    old = [-1.371234 - 0.013417 * place for place in range(len(values))]
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


def lengthy(
    third: int,
    lost: int,
    *,
    lengths: tuple[int, int, int] = (4, 8, 16),
    larger: float = 1.0,
    shown: tuple[int, int, int] = (0, 0, 0),
    less: int = 0,
) -> RolloutBatch:
    """Rows of three lengths, equally often, of which some of the longest have a weight of e^2.

    Args:
        third: rows of each length.
        lost: those of the longest that are off in one direction, and the others in both.
        lengths: of the rows.
        larger: how many times the gap of a token is that of others in the longest rows.
        shown: rows of each length with a log weight of a quarter; others have one of 0.
        less: so many rows less.
    """
    sizes, apart = [], []
    for length, some in zip(lengths, shown, strict=True):
        for row in range(third):
            is_lost = length == lengths[2] and row < lost
            size = 0.125 * (larger if length == lengths[2] else 1.0)
            each = [size * (1 if is_lost or place % 2 else -1) for place in range(length)]
            each[0] += 0.25 * (row < some)
            sizes.append(length)
            apart.append(each)
    sizes, apart = sizes[less:], apart[less:]
    rollout = [[-1.0 - x for x in each] for each in apart]
    return toy_batch(rewards(len(sizes)), lengths=sizes, rollout=rollout)


def bursts(
    *rows: tuple[int, int], length: int = 101, tail: float = 0.5, step: int = 0, base: float = 0.01
) -> RolloutBatch:
    """Rows with so many tokens that are far off, and so many pairs of neighbours among them; of one sign in turn.

    Args:
        rows: tokens and pairs of each.
        length: of the rows.
        tail: size of their gap.
        step: its number.
        base: size of the gap of the other tokens.
    """
    sign, found = 1.0, []
    for tokens, pairs in rows:
        # One run that has all the pairs, and the others alone.
        alone = tokens - pairs - 1
        far = {*range(1, 2 + pairs)} if tokens else set()
        far |= {pairs + 3 + 3 * place for place in range(alone)}
        assert max(far, default=0) < length - 1
        row = []
        for place in range(length):
            sign = -sign
            row.append(-1.0 - sign * (tail if place in far else base))
        found.append(row)
    return toy_batch(rewards(len(rows)), lengths=length, rollout=found, step=step)


def recurring(
    again: int, ratio: float, *, prompt: int = 200, first: int = 40, behind: int = 0, unsure: int = 32
) -> list[RolloutBatch]:
    """Prompts of which some recur at the next version, with so many times the gap.

    Args:
        again: prompts that recur.
        ratio: of the gaps.
        prompt: tokens of each.
        first: other prompts of the second version.
        behind: of these, how many have a larger gap than any of those.
        unsure: tokens of each response.
    """
    found = []
    for step in range(2):
        new = [(1 + 100 * step + place, 0.01 * (20 if step and place < behind else 1)) for place in range(first)]
        old = [(1 + place, 0.01 * ratio) for place in range(again)] if step else []
        rows = [*new, *old]
        per_row = {"prompt_ids": [name for name, _ in rows], "prompt_length": [prompt] * len(rows)}
        rollout = [[-1.0 - gap] * unsure for _, gap in rows]
        found.append(toy_batch([[0.0]] * len(rows), lengths=unsure, rollout=rollout, per_row=per_row, step=step))
    return found


def frozen(
    prompts: int, *, versions: int = 2, move: float = 0.5, share: float = 1.0, creep: float = 0.0
) -> list[RolloutBatch]:
    """Prompts that recur at each version, at which the trainer's log-prob moves.

    Args:
        prompts: so many, of two rows each.
        versions: so many.
        move: of the trainer, from version to version.
        share: of the prompts at which the sampler does not move.
        creep: how far it does there all the same.
    """
    found = []
    for step in range(versions):
        rows = [prompt for prompt in range(prompts) for _ in range(2)]
        moves = [creep if prompt < round(share * prompts) else move for prompt in rows]
        found.append(
            toy_batch(
                [[1.0, 0.0]] * prompts,
                lengths=1,
                policy=[[-1.2345 - move * step]] * len(rows),
                rollout=[[-1.2345 - x * step] for x in moves],
                per_row={"prompt": [1 + prompt for prompt in rows]},
                per_token={"response_ids": [[7]] * len(rows)},
                step=step,
            )
        )
    return found


def shifted(
    gaps: Sequence[float], prompts: Sequence[int], micro: Sequence[int] | None = None, length: int = 8
) -> RolloutBatch:
    """Rows with prompts of some lengths, in one micro-batch or several, and their gaps."""
    rows = len(gaps)
    per_row = {
        "prompt_ids": range(1, rows + 1),
        "prompt_length": prompts,
        "micro_batch_id": [0] * rows if micro is None else micro,
    }
    rollout = [[-1.0 - gap] * length for gap in gaps]
    return toy_batch([[0.0] * rows], lengths=length, rollout=rollout, per_row=per_row)


def padded(plain: int, others: int, gap: float, *, least: float = 0.01) -> RolloutBatch:
    """Rows of one micro-batch, some without padding and some with ten tokens of it, and the gaps of either."""
    return shifted([least] * plain + [gap] * others, [50] * plain + [40] * others)


def correlated(seed: int, own: float, by_prompt: float, spread: int) -> RolloutBatch:
    """Rows of six micro-batches, whose gaps go with their padding, with their prompts and with chance.

    Args:
        seed: of chance, by which a correlation is where it is wanted.
        own: logarithm of the gap for 60 tokens of padding.
        by_prompt: the same for a prompt that is so much shorter.
        spread: tokens from micro-batch to micro-batch.
    """
    draw, row = np.random.default_rng(seed), np.arange(24)
    padding = np.where(row % 4 == 0, 0, draw.integers(5, 60, 24))
    prompt = 200 + spread * (row // 4 * 5 % 6) - padding
    size = 0.01 * np.exp(own * padding / 60 - by_prompt * (prompt - 200) / 60 + draw.normal(size=24))
    return shifted(size.tolist(), prompt.tolist(), (row // 4).tolist())


def rising(rows: int, ratio: float, each: int = 4) -> RolloutBatch:
    """Rows of micro-batches whose gaps rise a little with padding, and to so many times those of rows without."""
    padding = [0 if row % each == 0 else 1 + row for row in range(rows)]
    gaps = [0.01 * (ratio if some else 1.0) * (1 + some / 1e4) for some in padding]
    prompts = [300 + 60 * (row // each * 5 % 6) - some for row, some in enumerate(padding)]
    return shifted(gaps, prompts, [row // each for row in range(rows)])


def packed(
    ratio: float, *, first: float = 0.05, packs: int = 40, less: int = 0, start: int = 0, unsure: int = 20
) -> RolloutBatch:
    """Packs of two rows, of which the second has so many times the gap.

    Args:
        ratio: of the gaps.
        first: gap of the first row.
        packs: how many.
        less: packs whose second row has half the gap.
        start: first token of which the sampler was not sure.
        unsure: how many of those there are.
    """
    sizes = [size for pack in range(packs) for size in (first, first * (0.5 if pack < less else ratio))]
    rows = [[-1.0 - size if start <= place < start + unsure else -0.01 for place in range(20)] for size in sizes]
    policy = [[-1.0 if each < -0.5 else -0.01 for each in row] for row in rows]
    per_row = {"micro_batch_id": [row // 2 for row in range(2 * packs)], "pack_index": [0, 1] * packs}
    return toy_batch([[1, 0]] * packs, lengths=20, policy=policy, rollout=rows, per_row=per_row)


def far(tokens: int, others: int, *, ratio: float = 4.0, ref: float | None = None) -> RolloutBatch:
    """Tokens of a negative advantage whose ratio is that, and others with a ratio of 1."""
    old = [-1.0 - log(ratio)] * tokens + [-1.0] * others
    return toy_batch([[1, 0]], lengths=[1, len(old)], old=[[-1.0], old], ref=ref)


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
        "least_deviations",
        sided(550, (-0.1, 32), rest=0.0),
        sided(550, (-0.1, 36), rest=0.0),
        ("clean", "info: the trainer's log-probs .* those of the sampler are not"),
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
    RowBoundary("RDO007", "least_rows", lengthy(20, 20, less=1), lengthy(20, 20), ("skipped", "warning"), MASKED),
    RowBoundary("RDO007", "lost", lengthy(82, 8), lengthy(78, 8), ("skipped", "warning"), MASKED),
    RowBoundary("RDO007", "lost_for_sure", lengthy(206, 10), lengthy(194, 10), ("skipped", "warning"), MASKED),
    RowBoundary("RDO007", "beyond_chance", lengthy(120, 8), lengthy(120, 10), ("skipped", "warning"), MASKED),
    near("RDO007", "same_gap", 1.5, lambda x: lengthy(20, 10, larger=x), "warning", "info", **MASKED),
    RowBoundary(
        "RDO007",
        "correlated",
        lengthy(100, 0, shown=(32, 50, 68)),
        lengthy(100, 0, shown=(31, 50, 69)),
        ("clean", "info"),
        MASKED,
    ),
    RowBoundary(
        "RDO007",
        "longer",
        lengthy(20, 20, lengths=(50, 54, 58)),
        lengthy(20, 20, lengths=(50, 54, 62)),
        ("not applicable", "warning"),
        MASKED,
    ),
    RowBoundary(
        "RDO008",
        "least_tokens",
        bursts(*[(10, 4)] * 3, length=663),
        bursts(*[(10, 4)] * 4, length=500),
        ("skipped", "info"),
    ),
    RowBoundary(
        "RDO008",
        "tail_ratio",
        bursts(*[(4, 2)] * 20, base=0.632 * centre(9, -6), tail=0.632 * centre(13, -3)),
        bursts(*[(4, 2)] * 20, base=0.632 * centre(11, -6), tail=0.632 * centre(9, -2)),
        ("skipped", "info"),
    ),
    RowBoundary(
        "RDO008",
        "least_tail",
        [bursts((10, 5), *[(0, 0)] * 19), bursts((0, 0), base=0.3, step=1)],
        [bursts((11, 5), *[(0, 0)] * 19), bursts((0, 0), base=0.3, step=1)],
        ("skipped", "info"),
    ),
    RowBoundary(
        "RDO008",
        "bursts",
        bursts(*[(10, 4)] * 4, (3, 0), *[(1, 0)] * 3, *[(0, 0)] * 32, length=51),
        bursts(*[(10, 4)] * 3, (9, 4), (2, 0), *[(1, 0)] * 3, *[(0, 0)] * 32, length=51),
        ("skipped", "info"),
    ),
    RowBoundary(
        "RDO008",
        "some_bursts",
        bursts(*[(33, 13)] * 24, *[(33, 14)] * 6),
        bursts(*[(33, 14)] * 30),
        ("skipped", "info"),
    ),
    RowBoundary(
        "RDO008",
        "beyond_chance",
        bursts(*[(10, 2)] * 15, *[(10, 1)] * 5),
        bursts(*[(10, 2)] * 16, *[(10, 1)] * 4),
        ("skipped", "info"),
    ),
    count("RDO009", "least_length", 128, lambda n: recurring(20, 5.0, prompt=n), "not applicable", "warning"),
    count("RDO009", "least_records", 10, lambda n: recurring(n, 5.0), "skipped", "warning"),
    near("RDO009", "factor", 3.0, lambda x: recurring(10, x, first=10), "skipped", "warning"),
    RowBoundary(
        "RDO009",
        "level",
        recurring(13, 5.0, first=34, behind=8),
        recurring(11, 5.0, first=28, behind=6),
        ("warning", "skipped"),
    ),
    RowBoundary(
        "RDO009",
        "level_of_excess",
        recurring(19, 2.5, first=34, behind=5),
        recurring(18, 2.5, first=30, behind=4),
        ("warning", "clean"),
    ),
    near("RDO009", "factor_of_excess", 2.0, lambda x: recurring(20, x), "info", "warning"),
    near("RDO009", "excess_noted", 1.5, lambda x: recurring(20, x), "clean", "info"),
    count("RDO010", "least_pairs", 20, frozen, "skipped", "warning"),
    count("RDO010", "least_contexts", 5, lambda n: frozen(n, versions=4), "clean", "warning"),
    near("RDO010", "share", 0.9, lambda x: frozen(100, share=x), "clean", "warning"),
    near("RDO010", "least_move", 0.1, lambda x: frozen(20, move=x, creep=0.001), "clean", "warning"),
    near("RDO010", "least_exact", 0.002, lambda x: frozen(20, move=x), "clean", "warning"),
    count("RDO011", "least_rows", 16, lambda n: rising(n, 3.0, 3), "skipped", "warning: .* correlates"),
    RowBoundary(
        "RDO011",
        "level",
        correlated(1222, 2.0, 0.0, 40),
        correlated(1103, 2.0, 0.0, 40),
        ("skipped", "warning: .* correlates"),
    ),
    RowBoundary(
        "RDO011",
        "level_less_prompt",
        correlated(937, 1.0, 3.0, 10),
        correlated(400, 1.0, 3.0, 10),
        ("skipped", "warning: .* correlates"),
    ),
    near("RDO011", "factor", 2.0, lambda x: rising(24, x), "skipped", "warning: .* correlates"),
    near("RDO011", "factor_alone", 10.0, lambda x: padded(8, 8, 0.01 * x), "skipped", "warning: .* correlates"),
    near("RDO011", "least_alone", 0.001, lambda x: padded(8, 8, x, least=5e-5), "skipped", "warning: .* correlates"),
    near("RDO011", "factor_apart", 5.0, lambda x: padded(12, 12, 0.01 * x), "skipped", "warning: left padding"),
    RowBoundary("RDO011", "least_bits", padded(11, 11, 0.06), padded(11, 12, 0.06), ("skipped", "warning: left")),
    RowBoundary(
        "RDO013",
        "first_tokens",
        packed(5.0, start=12, unsure=4),
        packed(5.0, start=13, unsure=4),
        ("warning", "skipped"),
    ),
    count("RDO013", "least_tokens", 4, lambda n: packed(5.0, unsure=n), "skipped", "warning"),
    near("RDO013", "times", 3.0, packed, "clean", "warning"),
    near("RDO013", "nats", 0.01, lambda x: packed(5.0, first=x / 5), "clean", "warning"),
    RowBoundary(
        "RDO013",
        "deviations",
        packed(5.0, packs=100, less=31),
        packed(5.0, packs=100, less=29),
        ("skipped", "warning"),
    ),
    near("RDO017", "least_lost", 0.01, lambda x: collapsed(60, -log1p(-EVEN * x / (1 - x))), "clean", "warning"),
    count("RDO017", "fewest", 50, lambda n: collapsed(n, 0.02), "clean", "warning"),
    near("RDO017", "apart", 0.75, lambda x: collapsed(60, x), "warning", "clean"),
    near("RDO016", "least", 0.01, lambda x: far(1, round(4 / x) - 5), "clean", "info", **UNCAPPED),
    count("RDO016", "fewest", 10, lambda n: far(n, 90, ref=-1.2), "clean", "info", trainer="trl", beta=0.1),
    near(
        "RDO016",
        "least_tokens",
        0.001,
        lambda x: far(20, round(20 / x) - 20, ref=-1.2),
        "clean",
        "info",
        trainer="trl",
        beta=0.1,
    ),
]

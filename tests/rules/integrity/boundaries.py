"""Numbers of the rules of this family: rows just below each, and just above."""

from collections.abc import Sequence
from dataclasses import replace
from math import log, sqrt
from typing import Any

from rules.row_boundaries import Batches, RowBoundary, count, near

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.testing import toy_batch, toy_turns

END = 2
Ids = Sequence[Sequence[int]]


def rewards(rows: int) -> list[list[float]]:
    """One group, of which every other row is right."""
    return [[float(row % 2) for row in range(rows)]]


def ended(ids: Ids, statuses: Sequence[str] | None = None, **columns: Any) -> RolloutBatch:
    """Rows with token ids, and how they ended: all of them stopped, unless `statuses` say otherwise."""
    columns = {"lengths": [len(row) for row in ids], **columns}
    batch = toy_batch(rewards(len(ids)), **columns, per_token={"response_ids": ids})
    return replace(batch, statuses=list(statuses or ["stop"] * len(ids)))


def mixed(one: Any, other: Any, share: float, rows: int) -> list[Any]:
    """So many rows of which a share are of one kind."""
    some = round(share * rows)
    return [one] * some + [other] * (rows - some)


def cut(*shares: float, rows: int = 200) -> list[RolloutBatch]:
    """Steps of which a share of the rows was cut off."""
    return [
        replace(
            toy_batch([[0.0] * rows], lengths=1, policy=None, step=step),
            statuses=mixed("length", "stop", share, rows),
        )
        for step, share in enumerate(shares)
    ]


def copies(share: float) -> RolloutBatch:
    """Responses of which a share repeats another one, and nothing says how likely they were."""
    rows = 200
    ids = [[max(0, row - round(share * rows))] for row in range(rows)]
    return toy_batch(rewards(rows), lengths=1, policy=None, per_token={"response_ids": ids})


def twice(nats: float) -> RolloutBatch:
    """Ten responses, all of so many nats beyond the number of their pairs, of which one is there twice."""
    ids = [[row, 50] for row in (0, *range(9))]
    sampled = -(nats + log(45)) / 2
    return toy_batch(rewards(10), lengths=2, policy=None, rollout=sampled, per_token={"response_ids": ids})


def masked_ends(share: float, *, of: float = 1.0, rows: int = 400) -> RolloutBatch:
    """Rows of which a share ends with the usual token, and of these some have it masked."""
    ids = mixed([5, 6, END], [5, 6, 7], share, rows)
    return ended(ids, mask=mixed([1, 1, 0], [1, 1, 1], of, rows))


def padded(share: float, rows: int = 100) -> RolloutBatch:
    """Rows of which a share ends with the usual token, and is trained on another one behind it."""
    return ended(mixed([5, END, END], [5, 6, 7], share, rows), policy=None)


def after_end(share: float) -> RolloutBatch:
    """Ten rows with one usual token too much among them, which is a share of their trained tokens."""
    tokens = round(1 / share)
    size = tokens // 10
    ids = [[5] * (size - 2) + [END, END], [5] * (tokens - 9 * size - 1) + [END], *[[5] * (size - 1) + [END]] * 8]
    return ended(ids, policy=None)


def zeros(alone: int, rows: int) -> RolloutBatch:
    """Rows with three tokens in a run to which the sampler alone gave a log-prob of 0.0, and some with one more."""
    own = [[-1.0, *[0.0] * 3, -1.0, 0.0 if row < alone else -1.0, -1.0] for row in range(rows)]
    old = [[-3.0 if each == 0 else -1.0 for each in row] for row in own]
    return toy_batch(rewards(rows), lengths=7, policy=old, rollout=own)


def prompts(order: str) -> list[RolloutBatch]:
    """A step for each letter, which is its prompt."""
    return [toy_batch([[1, 0]], per_row={"prompt": [ord(one)] * 2}, step=step) for step, one in enumerate(order)]


def two_repeated(pool: int) -> list[RolloutBatch]:
    """Nine steps, the seventh and eighth with the three prompts of the first and second, of so many prompts in all."""
    seen = [range(3 * at, 3 * at + 3) for at in (0, 1, 2, 3, 4, 5, 0, 1)] + [range(18, pool)]
    return [
        toy_batch([[1.0]] * len(own), lengths=1, per_row={"prompt": [1 + one for one in own]}, step=step)
        for step, own in enumerate(seen)
    ]


def noisy_share(errors: float) -> dict[str, list[float]]:
    """A log of a truncated share that goes up and down, and five steps of 0.95, so many standard errors above all."""
    above = 0.95 - (30 * 0.5 + 5 * 0.95) / 35
    step = above / errors * 0.6745 * sqrt(10)
    return {"truncated_share": [0.5 + step * (-1) ** place / 2 for place in range(30)] + [0.95] * 5}


def grown(last: float = 0.29, errors: float = 40.0) -> dict[str, list[float]]:
    """A log of a truncated share that is 0.15 in the first third and larger in the last, by so many standard errors."""
    size = (last - 0.15) / errors * 3 / sqrt(2)
    return {"truncated_share": [mean + size * (-1) ** place for mean in (0.15, 0.15, last) for place in range(10)]}


def turns(near: Sequence[float], rest: float, rows: int) -> RolloutBatch:
    """Rows with a second turn, whose first four tokens are so far apart by row, and the others by `rest`."""
    mask = [1] * 8 + [0] + [1] * 8
    policy = [[-1.0] * len(mask)] * rows
    rollout = [[-1.0 - rest] * 9 + [-1.0 - size] * 4 + [-1.0 - rest] * 4 for size in near]
    return toy_batch(rewards(rows), mask=[mask] * rows, policy=policy, rollout=rollout)


def starts(low: float, high: float, scale: float = 2.0**-9) -> RolloutBatch:
    """Turns that start with a gap of just above `low`, the others have one just below `high`: their bins end there."""
    return turns([low * scale * 1.01] * 40, high * scale * 0.99, 40)


def late_rewards(bits: int) -> RolloutBatch:
    """Truncated responses, so many, have the lowest reward, and so have they alone; all rewards are a row late."""
    rows = 2 * bits
    is_cut = [row * row % rows % 5 < 2 for row in range(rows)]
    while sum(is_cut) != bits:
        is_cut[is_cut.index(sum(is_cut) > bits)] ^= True
    batch = toy_batch([[0.0 if is_cut[row - 1] else 1.0 for row in range(rows)]], lengths=1, policy=None)
    return replace(batch, statuses=["length" if one else "stop" for one in is_cut])


def images(tokens: Sequence[int], rows: int, with_image: int | None = None) -> RolloutBatch:
    """Responses to prompts with an image, the first of which have runs of so many tokens of its id."""
    ids = [[9] * each + [5] for each in tokens] + [[5]] * (rows - len(tokens))
    some = rows if with_image is None else with_image
    per_row = {"prompt_ids": range(1, rows + 1), "placeholder": [9] * some + [-1] * (rows - some)}
    lengths = [len(row) for row in ids]
    return toy_batch(rewards(rows), lengths=lengths, per_token={"response_ids": ids}, per_row=per_row)


def capped(whole: int, cut_off: int) -> RolloutBatch:
    """Rows that end, and some of the largest length that do not, all of which are said to have stopped."""
    return ended([[5, END]] * whole + [[5, 6, 7, 8]] * cut_off)


def forced(nats: float) -> RolloutBatch:
    """Ten ends at the stated limit, with so many nats all together."""
    ids = [[5, END]] * 60 + [[5, 6, 7, END]] * 10
    return ended(ids, rollout=[[-1.0] * (len(row) - 1) + [-nats / 10] for row in ids])


def conversation(bare: int, kept: int, other: int = 0) -> RolloutBatch:
    """Rows with a turn that a span follows, without the separator 9 or with it, or that ends with another id."""
    tool, last = [5, 6, END, 9, 7], [3, END]
    kinds = [[3, 4, END]] * bare + [[3, 4, END, 9]] * kept + [[3, 4, 8, 9]] * other
    ids = [[*turn, *tool, *last] for turn in kinds]
    mask = [[1, 1, 1] + [0] * (len(row) - 5) + [1, 1] for row in ids]
    return toy_batch(rewards(len(ids)), mask=mask, per_token={"response_ids": ids})


def stamped(
    steps: int, *, share: float = 0.0, constant: bool = False, gap: float = 0.01, moved: float = 0.0
) -> Batches:
    """Steps of which a share of the rows has a placeholder for its oldest version; the trainer moves by so much.

    Args:
        steps: how many.
        share: of the placeholders.
        constant: one version in all of them.
        gap: of sampler and trainer.
        moved: nats from the reference in the last step.
    """
    found = []
    for step in range(steps):
        newest = [7 if constant else step] * 100
        oldest = mixed(-1, newest[0], share, 100)
        policy = -1.0 - moved * step / (steps - 1)
        per_row = {"policy_version_min": oldest, "policy_version_max": newest}
        found.append(
            toy_batch(
                rewards(100), lengths=1, policy=policy, rollout=policy - gap, ref=-1.0, per_row=per_row, step=step
            )
        )
    return found


def lost(share: float) -> RolloutBatch:
    """Two trajectories of ten thousand tokens of the model, of which a share is in a turn that is masked."""
    tokens = round(10_000 * share)
    spans = [[("model", 0, first), ("model", first, 5000)] for first in (tokens, 2500)]
    mask = [[0] * tokens + [1] * (5000 - tokens), [1] * 5000]
    return replace(toy_batch(rewards(2), mask=mask, policy=None), turns=toy_turns(*spans))


def forging(headers: Ids, insides: Ids) -> RolloutBatch:
    """Rows with a turn of a tool, which begin so; the model goes on with these tokens."""
    middles = [*insides, *[[]] * (len(headers) - len(insides))]
    ids = [[1, *header, 1, *inside, 2] for header, inside in zip(headers, middles, strict=True)]
    mask = [[1, *[0] * len(header), 1, *[1] * len(inside), 1] for header, inside in zip(headers, middles, strict=True)]
    return toy_batch(rewards(len(ids)), mask=mask, policy=None, per_token={"response_ids": ids})


def headed(count: int, *header: int, others: int = 0) -> Ids:
    """Beginnings of so many turns, and of others that have none in common."""
    alone = [[200 + 3 * row, 201 + 3 * row, 202 + 3 * row] for row in range(others)]
    return [*([*header, 1000 + row] for row in range(count)), *alone]


LONG = range(10, 30)

BOUNDARIES: list[RowBoundary] = [
    near("RDI019", "info_from", 0.01, lost, "clean", "info"),
    near("RDI019", "warn_from", 0.1, lost, "info", "warning"),
    count("RDI020", "least", 3, lambda n: forging(headed(9, *LONG[:n]), [LONG[:n]]), "skipped", "warning"),
    count("RDI020", "most", 16, lambda n: forging(headed(9, *LONG), [LONG[:n]]), "clean", "warning"),
    count("RDI020", "fewest", 8, lambda n: forging(headed(n, 5, 6, 7), [[5, 6, 7]]), "skipped", "warning"),
    near(
        "RDI020",
        "share_from",
        0.5,
        lambda x: forging(headed(round(100 * x), 5, 6, 7, others=100 - round(100 * x)), [[5, 6, 7]] * 2),
        "skipped",
        "warning",
    ),
    near(
        "RDI020",
        "kept_from",
        0.9,
        lambda x: forging(
            [*headed(round(100 * x), 5, 6, 7, 8), *headed(100 - round(100 * x), 5, 6, 7)], [[5, 6, 7]] * 2
        ),
        "warning",
        "clean",
    ),
    # 19 and 20 of 2,000 rows.
    RowBoundary(
        "RDI020",
        "warn_from",
        *(forging(headed(2000, 5, 6, 7), [[5, 6, 7]] * forged) for forged in (19, 20)),
        ("info", "warning"),
    ),
    count("RDI012", "fewest", 3, lambda n: cut(*[1.0] * n), "warning: every response", "error: every response"),
    count("RDI012", "window", 5, lambda n: cut(*[1.0] * n, 0.0, 0.0), "info", "warning: at least"),
    near("RDI012", "warn_from", 0.9, lambda x: cut(*[x] * 5), "info", "warning: # % of the responses are"),
    near("RDI012", "errors", 4.0, noisy_share, "info: .* of the responses are truncated", "warning: at least"),
    near("RDI012", "many", 0.25, lambda x: cut(*[x] * 10), "clean", "info: .* of the responses are truncated"),
    near("RDI012", "many", 0.25, grown, "clean", "info: .* truncated in the last third of"),
    near("RDI012", "errors", 4.0, lambda errors: grown(errors=errors), "clean", "info: .* in the last third of"),
    count("RDI012", "long", 10, lambda n: cut(*[0.3] * n, rows=10), "clean", "info"),
    near("RDI012", "many_of_few", 1 / 3, lambda x: cut(*[x] * 9), "clean", "info"),
    near("RDI009", "info_above", 0.25, copies, "skipped", "info: .* repeat another"),
    near("RDI009", "nats", 30.0, twice, "clean", "error"),
    near("RDI007", "end_share", 0.9, masked_ends, "skipped", "warning"),
    count("RDI007", "fewest_ends", 8, lambda n: masked_ends(1.0, rows=n), "skipped", "warning"),
    near("RDI007", "warn_from", 0.1, lambda x: masked_ends(1.0, of=x), "info", "warning"),
    count(
        "RDI005",
        "least_tokens",
        3,
        lambda n: toy_batch(rewards(4), policy=-2.5, rollout=[[-1.0, -2.4, -2.5, -2.6]] * n + [[-2.4] * 4] * (4 - n)),
        "clean",
        "warning",
    ),
    near("RDI006", "end_share", 0.9, padded, "skipped", "warning: .* after the end"),
    count("RDI006", "fewest_ends", 8, lambda n: padded(1.0, n), "skipped", "warning: .* after the end"),
    near("RDI006", "warn_above", 0.01, after_end, "skipped", "warning: .* after the end"),
    RowBoundary("RDI006", "most_alone", zeros(29, 100), zeros(31, 100), ("warning", "skipped")),
    count("RDI013", "fewest", 3, lambda n: prompts("abcdefg" + "abc"[:n] + "hijk"), "clean", "warning"),
    # 6 log2(pool) less log2(36) and 2 log2(6): 19.7 and 20.4 bits.
    RowBoundary(
        "RDI013",
        "least_bits",
        two_repeated(32),
        two_repeated(35),
        ("info", "warning"),
        logged=([{"epoch": step / 40} for step in range(9)],) * 2,
    ),
    count("RDI010", "fewest", 20, lambda n: turns([0.5] * n, 0.002, n), "skipped", "warning"),
    RowBoundary("RDI010", "times", starts(6.0, 1.25, 0.01), starts(8.0, 1.5, 0.01), ("info", "warning")),
    RowBoundary("RDI010", "nats", starts(1.25, 0.1, 2**-7), starts(1.5, 0.1, 2**-7), ("info", "warning")),
    RowBoundary("RDI010", "times_noted", starts(1.75, 1.0), starts(2.0, 1.0), ("clean", "info")),
    near(
        "RDI010",
        "beyond_chance",
        5.0,
        lambda x: turns(mixed(0.001, 0.004, 0.5 - x / 20, 100), 0.001, 100),
        "clean",
        "info",
    ),
    RowBoundary("RDI004", "bits", late_rewards(39), late_rewards(41), ("skipped", "warning"), {"trainer": "trl"}),
    count("RDI018", "fewest", 5, lambda n: images([1] * n, 40), "warning", "not applicable"),
    near("RDI018", "ordinary", 0.05, lambda x: images([1] * round(400 * x), 400), "warning", "not applicable"),
    count("RDI018", "warned", 3, lambda n: images([n], 40), "info", "warning"),
    count("RDI018", "image", 16, lambda n: images([n], 40), "warning", "clean"),
    near("RDI018", "images_from", 0.1, lambda x: images([3], 400, round(400 * x)), "not applicable", "warning"),
    near("RDI011", "end_share", 0.9, lambda x: capped(round(100 * x), 100 - round(100 * x)), "skipped", "error"),
    count("RDI011", "fewest_ends", 8, lambda n: capped(n, 0), "skipped", "clean"),
    count("RDI011", "fewest", 5, lambda n: capped(60, n), "clean", "error"),
    near("RDI011", "nats", 16.0, forced, "skipped", "warning", trainer="trl", max_completion_length=4),
    count("RDI016", "fewest", 8, lambda n: conversation(n, 20), "info", "warning"),
    near(
        "RDI016",
        "one_id",
        0.9,
        lambda x: conversation(50, round(100 * x) - 50, 100 - round(100 * x)),
        "skipped",
        "warning",
    ),
    near("RDI016", "least", 0.05, lambda x: conversation(8, round(8 / x) - 8), "info", "warning"),
    count("RDI017", "fewest", 4, stamped, "skipped", "clean"),
    count("RDI017", "same", 8, lambda n: stamped(n, constant=True, moved=0.5), "clean", "warning"),
    near("RDI017", "share", 0.9, lambda x: stamped(4, share=x), "clean", "warning"),
    near("RDI017", "times", 4.0, lambda x: stamped(8, constant=True, gap=0.01, moved=0.02 * x), "skipped", "warning"),
    near("RDI017", "least", 0.02, lambda x: stamped(8, constant=True, gap=1e-3, moved=x), "skipped", "warning"),
]

"""Numbers that stand beside a rule over rows, in its module or one that it measures with: rows just below, and above.

The law is that of `test_row_thresholds.py`; a number is named by its module, and changed where it is read.
"""

import re
from importlib import import_module
from math import cos, log, sin

import pytest
from rules.integrity.boundaries import prompts, rewards
from rules.integrity.test_mask_leak import conversation
from rules.off_policy.boundaries import far, gapped, recurring, shifted
from rules.row_boundaries import RowBoundary, count, near

from rolloutdoctor.testing import toy_batch

MISMATCH = "off_policy.sampler_mismatch"
COMMON = "measures.common_tokens"


def pairs(sampler, trainer, rows=4, length=4, tokens=3, others=-2.0):
    """Rows of which some tokens have these log-probs, one a row, and the others are the same to both engines."""
    own = [
        [sampler if row < tokens and place == row else others - place / 9 for place in range(length)]
        for row in range(rows)
    ]
    old = [
        [trainer if row < tokens and place == row else others - place / 9 for place in range(length)]
        for row in range(rows)
    ]
    return toy_batch(rewards(rows), lengths=length, policy=old, rollout=own)


def low_run(log_prob):
    """Three tokens in a row of this log-prob."""
    return toy_batch(rewards(2), lengths=5, policy=[[-1.0, *[log_prob] * 3, -1.0], [-1.0] * 5])


def zeros(mean):
    """Three tokens to which the sampler gave a log-prob of 0.0, and the trainer another one."""
    own = [[-1.0, 0.0, 0.0, 0.0, -1.0]] * 2
    return toy_batch(rewards(2), lengths=5, policy=[[-1.0, *[mean] * 3, -1.0]] * 2, rollout=own)


def branched(nats):
    """Two responses of a group that share 64 tokens of so many nats, and part."""
    ids = [[5] * 64 + [6] * 6, [5] * 64 + [7] * 6, *[[row] * 70 for row in range(8, 14)]]
    groups = {"prompt": [1] * 4 + [2] * 4}
    return toy_batch(
        [[1.0, 0.0] * 2] * 2,
        lengths=70,
        policy=None,
        rollout=-nats / 64,
        per_row=groups,
        per_token={"response_ids": ids},
    )


def again(*, groups, differing):
    """Groups of four, two of them alike; in some these have different rewards."""
    scores = [[1.0, 0.0, 1.0, 0.0] if group < differing else [1.0, 1.0, 0.0, 0.0] for group in range(groups)]
    ids = [[1000 + group + 500 * max(0, row - 1)] for group in range(groups) for row in range(4)]
    return toy_batch(scores, lengths=1, policy=None, per_token={"response_ids": ids})


def line(rows, kinds):
    """Rewards that are a line in the length of the response, of so many rows and lengths, and each a row late."""
    lengths = sorted([10 + 3 * (row % kinds) for row in range(rows - 2)] + [4, 60])
    order = [(11 * row) % rows for row in range(rows)]
    sizes = [lengths[place] for place in order]
    return toy_batch([[1.0 - sizes[row - 1] / 100 for row in range(rows)]], lengths=sizes, policy=None)


def apart(gap, others=101, tokens=20):
    """A row whose tokens have this gap, and seven with so many tokens in which one is far off."""
    lengths = [tokens, *[6] * 6, others - 36]
    rollout = [[-1.0 - (0.0 if row else gap)] * length for row, length in enumerate(lengths)]
    rollout[1][0] = -2.0
    return toy_batch(rewards(8), lengths=lengths, rollout=rollout)


def lattice(size):
    """Log-probs of the sampler of one size, with three decimal digits."""
    return toy_batch([[1.0]], lengths=200, policy=[[-1.371234 - 0.013417 * x for x in range(200)]], rollout=-size)


def moved(share):
    """Log-probs that are far below their entropy, by a policy that has moved by a share of it."""
    return toy_batch(rewards(100), lengths=1, policy=-3.0, old=-3.0 - 2.0 * share, per_token={"entropy": 2.0})


def passed(residue):
    """A group of equal rewards with an advantage of so many units of a float32 mean, and one of which each counts."""
    advantages = [residue * 2.0**-24] * 8 + [0.5, -0.5]
    return toy_batch([[1] * 8, [1, 0]], lengths=2, policy=-0.5, rollout=-0.5, per_row={"advantage": advantages})


def parted(token):
    """Thirty pairs of rows that differ in one token, the last, of which the sampler has twice the distance."""
    old = [[-1.0] * (token - 1) + [last] for last in (-0.5, -2.5)]
    own = [[-1.0] * (token - 1) + [last] for last in (-0.5, -4.5)]
    ids = [[1] * (token - 1) + [last] for last in (2, 3)]
    return toy_batch(
        [[0.0] * 2] * 30, lengths=token, policy=old * 30, rollout=own * 30, per_token={"response_ids": ids * 30}
    )


def summed(radii):
    """A clipped share that differs from the sum of its two parts by so much of it."""
    low, high = ([share + 0.00012345678912 * line for line in range(9)] for share in (0.01234567891234, 0.02345678912))
    both = [(one + other) * (1 + radii) for one, other in zip(low, high, strict=True)]
    return {"clip_fraction_low": low, "clip_fraction_high": high, "clip_fraction": both}


def surprising(gap):
    """Tokens of log-prob -3 and an entropy of 2 nats, to which the trainer gives less by some nats."""
    return toy_batch(rewards(100), lengths=1, policy=-3.0 - gap, rollout=-3.0, per_token={"entropy": 2.0})


def added(lines):
    """A loss that is the sum of its two parts with one coefficient each, but for the last line."""
    loss = {
        "policy_loss": [0.1 * sin(line) for line in range(lines)],
        "entropy": [1.0 + cos(line) for line in range(lines)],
    }
    whole = [policy - 0.01 * entropy for policy, entropy in zip(*loss.values(), strict=True)]
    return {**loss, "loss": [*whole[:-1], whole[-1] + 0.05]}


def spread(squares):
    """First tokens with such a sum of squares about their mean, of both log-probs together."""
    half = (squares / (2 * (1 + 4))) ** 0.5
    old = [[-2.0 - half], [-2.0 + half]]
    return toy_batch([[0.0] * 2] * 30, lengths=1, policy=old * 30, rollout=[[2 * x + 0.5] for (x,) in old] * 30)


def early(length):
    """Rows whose first quarter has five times the gap of the rest."""
    first = length // 4
    rollout = [[-1.05] * first + [-1.01] * (length - first)] * 4
    return [toy_batch(rewards(4), lengths=length, rollout=rollout, step=step) for step in range(4)]


def unsure(log_prob):
    """Steps whose gap rises, of tokens to which the sampler gave so much."""
    return [
        toy_batch(rewards(2), lengths=100, policy=log_prob - gap, rollout=log_prob, step=step)
        for step, gap in enumerate([0.01] * 3 + [0.2] * 3)
    ]


def gaps_of(plain, others, tokens=8):
    """Rows of one micro-batch without padding and with some, whose gap is twelve times as large, of so many tokens."""
    gaps = [0.01] * plain + [0.12] * others
    return shifted(gaps, [50] * plain + [40] * others, length=tokens)


def turning(rows, back, others):
    """Rows whose first half has eight times the gap of the second, some with the halves exchanged, and others."""
    high, low = [-1.08] * 32, [-1.01] * 32
    found = [[*high, *low]] * rows + [[*low, *high]] * back
    # Of a step with more tokens only some are looked at.
    old = [toy_batch(rewards(4 + others // 3), lengths=64, rollout=-1.01, step=step) for step in range(3)]
    return [*old, toy_batch(rewards(len(found)), lengths=64, rollout=found, step=3)]


def slopes(one_sided, far=0):
    """Forty prompts whose first tokens have slope 1.5, but for some on the other side of 1 and some far off."""
    each = [1.5] * (one_sided - far) + [3.0] * far + [0.8] * (40 - one_sided)
    old = [-0.5, -2.0, -3.5]
    return toy_batch(
        [[0.0] * 3] * 40,
        lengths=1,
        policy=[[x] for x in old] * 40,
        rollout=[[slope * x + 0.2] for slope in each for x in old],
    )


def digits(share):
    """A thousand log-probs of the sampler, of which a share have one decimal digit."""
    own = [-1.5 - place % 40 / 10 - (0.0123457 if place >= round(1000 * share) else 0.0) for place in range(1000)]
    old = [-1.371234 - 0.013417 * place for place in range(1000)]
    return toy_batch([[1.0]], lengths=1000, policy=[old], rollout=[own])


def one_sided(above):
    """Bursts of eight tokens that are far off in each row of 101, of 160 of which so many are above."""
    rows, token = [], 0
    for _ in range(20):
        row = [-1.0 - 0.01 * (-1) ** place for place in range(101)]
        for place in range(10, 18):
            row[place] = -1.5 if 7 * token % 160 < above else -0.5
            token += 1
        rows.append(row)
    return toy_batch(rewards(20), lengths=101, rollout=rows)


def certain(zeros, others):
    """Tokens to which the sampler gave a log-prob of 0.0, and of -0.005, where the trainer's is another one."""
    own = [0.0] * zeros + [-0.005] * others
    return toy_batch(rewards(len(own)), lengths=1, policy=-2.0, rollout=[[x] for x in own])


def reference(steps, share):
    """A trainer that moves away from a sampler, which has a share of that gap to the reference."""
    return [
        toy_batch(
            rewards(2),
            lengths=4,
            policy=-1.0 - 0.1 * step,
            rollout=-1.0,
            ref=-1.0 - 0.1 * step * share,
            per_row={"prompt": [2 * step + 1] * 2},
            per_token={"response_ids": [[1, 2, 3, 4]] * 2},
            step=step,
        )
        for step in range(steps)
    ]


def noisy(move, noise, follows):
    """Thirty prompts at two versions, at which the trainer moves and the sampler follows, and noise of the trainer."""
    off = noise / 2**0.5
    return [
        toy_batch(
            [[1.0, 0.0]] * 30,
            lengths=1,
            policy=[[-1.2345 - move * step - off], [-1.2345 - move * step + off]] * 30,
            rollout=-1.2345 - follows * step,
            per_row={"prompt": [1 + row // 2 for row in range(60)]},
            per_token={"response_ids": [[7]] * 60},
            step=step,
        )
        for step in range(2)
    ]


def cut(tokens, zeros, excess):
    """Tokens whose sampler's log-probs are above the trainer's by so much, and some that are 0."""
    old = [-3.0 - 2.0 * (place % 2) for place in range(tokens)]
    own = [0.0 if place < zeros else x + excess for place, x in enumerate(old)]
    old = [-0.5 if place < zeros else x for place, x in enumerate(old)]
    return toy_batch([[1.0]], lengths=tokens, policy=[old], rollout=[own])


def ending(times, before=0.05, rows=20, even=0):
    """Responses that reach the end of the context, with so many times the gap in their last eight tokens, and others.

    Args:
        times: the earlier gap.
        before: the earlier gap.
        rows: that reach the end.
        even: of these, how many have a smaller gap there.
    """
    ends = [before * (0.5 if row < even else times) for row in range(rows)]
    rollout = [[-1.0 - before] * 32 + [-1.0 - end] * 8 for end in ends] + [[-1.0 - before] * 41] * rows
    per_row = {"prompt_ids": range(1, 2 * rows + 1), "prompt_length": [100] * rows + [50] * rows}
    return toy_batch(rewards(2 * rows), lengths=[40] * rows + [41] * rows, rollout=rollout, per_row=per_row)


def one_before(places):
    """Responses whose last eight tokens are six times as far off, and one token so many places before them more so."""
    row = [-1.05] * 40 + [-1.3] * 8
    row[40 - places] = -2.0
    per_row = {"prompt_ids": range(1, 41), "prompt_length": [100] * 20 + [50] * 20}
    rollout = [row] * 20 + [[-1.05] * 49] * 20
    return toy_batch(rewards(40), lengths=[48] * 20 + [49] * 20, rollout=rollout, per_row=per_row)


ONSET = [0.01] * 3 + [0.2] * 3
AT_END = "warning: the last tokens"
SYNC = {"apart": 0.01, "rows": 1}
BOUNDARIES = [
    near("RDI001", "measures.impossible_values.LOWEST", -1000.0, lambda x: pairs(-1.0, x), "clean", "error"),
    near("RDI001", "measures.impossible_values.HIGHEST", 88 / 256, lambda x: pairs(-1.0, x), "clean", "error"),
    near("RDO001", "measures.context_end._TIMES", 5.0, ending, "info", AT_END),
    RowBoundary("RDO001", "measures.context_end.EARLIER", one_before(32), one_before(33), ("info", AT_END)),
    near("RDO001", "measures.context_end._NATS", 0.1, lambda x: ending(6.0, x / 6), "info", AT_END),
    RowBoundary(
        "RDO001",
        "measures.context_end._DEVIATIONS",
        ending(6.0, rows=100, even=31),
        ending(6.0, rows=100, even=30),
        ("info", AT_END),
    ),
    near("RDI005", "integrity.logprob_placeholder.APART", 0.75, lambda x: pairs(-1.0, -1.0 - x), "clean", "warning"),
    near("RDI005", "measures.placeholders.LOWEST", -1000.0, lambda x: pairs(x, -2.0), "clean", "error"),
    near("RDI005", "measures.placeholders.HIGHEST", 0.05, lambda x: pairs(x, -2.0), "clean", "warning"),
    near("RDI006", "integrity.mask_leak.LOWEST", -12.0, low_run, "skipped", "warning: # tokens in runs of three"),
    near("RDI006", "integrity.mask_leak.UNLIKELY", -1.0, zeros, "skipped", "warning: # tokens in runs to which"),
    near(
        "RDI006",
        f"{COMMON}.LEAST",
        4.0,
        lambda x: conversation(low=-x, size=32, groups=1),
        "skipped",
        "warning: .* shared",
    ),
    near(
        "RDI006", f"{COMMON}.BEYOND", 40.0, lambda x: conversation(low=-(x + 5.1) / 3), "skipped", "warning: .* shared"
    ),
    RowBoundary(
        "RDI009",
        "measures.shared_prefixes.BEYOND",
        branched(49.5),
        branched(50.5),
        ("clean", "warning: .* begin like"),
    ),
    near(
        "RDA003",
        "advantages.float_residue._RESIDUE",
        64 * 2.0**-24,
        lambda x: passed(x * 2.0**24),
        "warning",
        "clean",
        trainer="prime-rl",
    ),
    count(
        "RDG002",
        "loss_log.FEWEST_LINES",
        10,
        lambda n: {"loss": [0.0] * n, "grad_norm": [0.0] * n},
        "skipped",
        "warning",
        trainer="trl",
    ),
    count(
        "RDG002",
        "loss_log.FEWEST_STILL",
        3,
        lambda n: {"loss": [0.0004] * n, "grad_norm": [0.0005] * n},
        "skipped",
        "info",
        trainer="trl",
    ),
    count("RDM008", "fitted_identities._SPARE", 5, lambda n: added(2 + n), "skipped", "warning", trainer="trl"),
    # Twice: the rounding of the share, and that of its parts.
    near(
        "RDM008",
        "identity_sides._SINGLE",
        2.0**-18,
        lambda x: summed(2 * x),
        "clean",
        "error",
        trainer="trl",
    ),
    RowBoundary(
        "RDI013",
        "integrity.resumed_data.EPOCH_SLACK",
        prompts("abcdefghabc"),
        prompts("abcdefgabch"),
        ("clean", "warning"),
        {"logged": [{"epoch": x} for x in (*(step / 10 for step in range(7)), 0.897, 0.903, 0.95, 0.97)]},
    ),
    RowBoundary(
        "RDI004",
        "integrity.reward_row_misaligned.LEAST",
        again(groups=240, differing=145),
        again(groups=240, differing=144),
        ("warning: .* identical responses", "skipped"),
        {"trainer": "trl"},
    ),
    RowBoundary(
        "RDI004",
        "integrity.reward_row_misaligned.MOST",
        again(groups=34, differing=34),
        again(groups=38, differing=38),
        ("skipped", "warning: .* identical responses"),
        {"trainer": "trl"},
    ),
    RowBoundary(
        "RDI004", "measures.reward_relations.LEAST", line(9, 7), line(10, 8), ("skipped", "warning"), {"trainer": "trl"}
    ),
    RowBoundary(
        "RDI004",
        "measures.reward_relations.KINDS",
        line(14, 5),
        line(14, 6),
        ("skipped", "warning"),
        {"trainer": "trl"},
    ),
    near(
        "RDO001", "measures.weight_sums.SURE", log(0.5), lambda x: pairs(x, -5.0), "warning: the sampler gave", "info"
    ),
    near(
        "RDO001",
        "measures.weight_sums.APART",
        2.0,
        lambda x: pairs(-0.1, -0.1 - x),
        "info",
        "warning: the sampler gave",
    ),
    near("RDO001", "measures.weight_sums.FAR", 0.1, apart, "info", "warning: .* disagree in"),
    RowBoundary("RDO001", f"{MISMATCH}.MOST_FAR", apart(0.5), apart(0.5, 96), ("warning: .* disagree in", "info")),
    near("RDO005", "off_policy.quantized_logprobs.LARGE", 0.1, lambda x: lattice(round(x, 3)), "skipped", "info"),
    near("RDO003", "off_policy.temperature_mismatch.MOVED", 0.02, moved, "warning", "skipped"),
    near("RDO003", "measures.contexts.LEAST_SPREAD", 1.0, spread, "skipped", "warning"),
    RowBoundary("RDO003", "measures.contexts.FIRST", parted(16), parted(17), ("warning", "skipped")),
    count(
        "RDO009",
        "off_policy.stale_prefix_cache.LEAST_TOKENS",
        32,
        lambda n: recurring(20, 5.0, unsure=n),
        "skipped",
        "warning",
    ),
    near(
        "RDO016",
        "off_policy.unbounded_ratio.FAR",
        3.0,
        lambda x: far(1, 9, ratio=x),
        "clean",
        "info",
        trainer="trl",
        beta=0.0,
    ),
    count(
        "RDO002",
        "off_policy.stale_policy.LEAST_TOKENS",
        100,
        lambda n: gapped(ONSET, rows=1, length=n),
        "skipped",
        "warning",
    ),
    count(
        "RDO014",
        "off_policy.sync_corrupts.LEAST_TOKENS",
        100,
        lambda n: gapped(ONSET, length=n, **SYNC),
        "skipped",
        "warning",
    ),
    count(
        "RDO002", "measures.sampler_gap.LONG", 32, lambda n: early(4 * n), "clean", "warning: .* in their first part"
    ),
    near("RDO002", "measures.sampler_gap.UNSURE", log(0.9), unsure, "skipped", "warning"),
]

WRITTEN = [
    # Losses that are printed with four digits, and with five.
    RowBoundary(
        "RDG002",
        "digits of a loss",
        *({"loss": [size, -size] * 5, "grad_norm": [1.5] * 10} for size in (0.0004, 0.00041)),
        ("info", "clean"),
        {"trainer": "trl"},
    ),
    # Contexts on one side of 1, and near the median.
    RowBoundary("RDO003", "one side", slopes(35), slopes(37), ("skipped", "warning")),
    RowBoundary("RDO003", "near the median", slopes(40, 9), slopes(40, 7), ("skipped", "warning")),
    # A surprise of 1.24 or 1.25 nats, and log-probs that differ by a fifth of it or almost.
    RowBoundary("RDO003", "share of the surprise", surprising(0.24), surprising(0.25), ("warning", "skipped")),
    # Values on a lattice, and sides of a tail.
    RowBoundary("RDO005", "on a lattice", digits(0.985), digits(0.995), ("clean", "warning")),
    RowBoundary("RDO008", "fewest above", one_sided(54), one_sided(58), ("skipped", "info")),
    RowBoundary("RDO008", "most above", one_sided(102), one_sided(106), ("info", "skipped")),
    # Rows of a step without padding, rows with it, and tokens of each.
    RowBoundary(
        "RDO011", "rows without padding", gaps_of(4, 12), gaps_of(5, 12), ("skipped", "warning: .* correlates")
    ),
    RowBoundary("RDO011", "padded rows", gaps_of(12, 7), gaps_of(12, 8), ("skipped", "warning: .* correlates")),
    RowBoundary("RDO011", "tokens", gaps_of(8, 8, 7), gaps_of(8, 8, 8), ("skipped", "warning: .* correlates")),
    RowBoundary("RDO011", "tokens apart", gaps_of(14, 14, 3), gaps_of(14, 14, 4), ("skipped", "warning: left padding")),
    # Steps before a jump that the first updates do not explain, and how far the reference is at its end.
    RowBoundary(
        "RDO014",
        "steps before",
        gapped([0.01] * 2 + [0.8] * 5, versions=range(7)),
        gapped([0.01] * 3 + [0.8] * 5, versions=range(8)),
        ("warning", "clean"),
    ),
    # Rows that turn, those that turn back, and all of them.
    count("RDO002", "rows that turn", 10, lambda n: turning(n, 0, 0), "clean", "warning"),
    RowBoundary("RDO002", "turns back", turning(19, 4, 0), turning(20, 4, 0), ("clean", "warning")),
    RowBoundary("RDO002", "share that turns", turning(12, 0, 1220), turning(12, 0, 1170), ("clean", "warning")),
    # Placeholders of 0.0 beside tokens that are nearly certain.
    count("RDI005", "times as many", 12, lambda n: certain(n, 4), "clean", "warning"),
    # The gap to the reference, and steps.
    near("RDO010", "of the gap", 0.1, lambda x: reference(5, x), "warning: the sampler still runs", "skipped"),
    count("RDO010", "steps", 4, lambda n: reference(n, 0.01), "skipped", "warning: the sampler still runs"),
    # The trainer's noise, and how far a sampler that stays may move.
    near("RDO010", "noises that move", 10.0, lambda x: noisy(0.5, 0.5 / x, 0.0), "clean", "warning"),
    near("RDO010", "share that stays", 0.1, lambda x: noisy(0.5, 0.0, 0.5 * x), "warning", "clean"),
    near("RDO010", "noises that stay", 4.0, lambda x: noisy(0.5, 0.02, 0.02 * x), "warning", "clean"),
    # Zeros of the sampler, and how large the excess of a cut support may be.
    near("RDO004", "zeros", 0.5, lambda x: cut(1000, round(1000 * x), 0.1), "warning", "clean"),
    RowBoundary("RDO004", "largest excess", cut(600, 0, 1.8), cut(600, 0, 2.4), ("warning", "clean")),
]


@pytest.mark.parametrize("boundary", BOUNDARIES + WRITTEN, ids=lambda one: f"{one.code} {one.number}")
def test_a_number_is_where_it_is_said_to_be(boundary):
    for outcome, says in zip(boundary.outcomes(), boundary.says, strict=True):
        assert re.match(says, outcome), (outcome, says)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", BOUNDARIES, ids=lambda one: f"{one.code} {one.number}")
def test_a_number_decides_between_the_two(boundary, monkeypatch):
    """With a tenth more or less of it, or one more or less of a count, both runs get the same answer."""
    where, _, name = boundary.number.rpartition(".")
    module = import_module(f"rolloutdoctor.rules.{where}")
    number = getattr(module, name)
    other = (number - 1, number + 1) if isinstance(number, int) else (number / 1.1, number * 1.1)
    alike = []
    for value in other:
        monkeypatch.setattr(module, name, value)
        below, above = boundary.outcomes()
        alike.append(below == above)
        monkeypatch.undo()
    assert any(alike)
